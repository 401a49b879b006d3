"""The corpus: one small file for each failure that was found, a JSON object with the bytes of the case."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


@dataclass(frozen=True, slots=True)
class Case:
    """The bytes of a file of a subject, and what was wrong."""

    subject: str
    data: bytes
    why: str


def read(path: Path) -> Case:
    """A case of the corpus."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if "text" in fields:
        data = fields["text"].encode("utf-8", "surrogatepass")
    else:
        data = zlib.decompress(base64.b64decode("".join(fields["zlib"])))
    return Case(fields["subject"], data, fields["why"])


def write(case: Case, folder: Path = CORPUS) -> Path:
    """Add a case; the same bytes have the same name."""
    path = folder / f"{case.subject}-{hashlib.sha256(case.data).hexdigest()[:8]}.json"
    fields: dict[str, object] = {"subject": case.subject, "why": case.why}
    try:
        text = case.data.decode()
    except UnicodeDecodeError:
        text = ""
    if text and len(text) < 2000:
        fields["text"] = text
    else:
        packed = base64.b64encode(zlib.compress(case.data, 9)).decode()
        fields["zlib"] = [packed[start : start + 100] for start in range(0, len(packed), 100)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    return path
