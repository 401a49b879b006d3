"""Mutations of files: a few numbers, which hypothesis draws and shrinks, say what is changed in a whole file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml
from hypothesis import strategies as st

from loka.kernels.measurements.measurement import digest
from tests.support.fuzz.documents import ODD, ODD_YAML, Object, Raw, changed, parsed, tree_of, written

Change = tuple[int, int, int, int]
NUMBER = st.integers(0, (1 << 16) - 1)
CHANGE = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)
CHANGES = st.lists(CHANGE, min_size=1, max_size=3)
BYTE_CHANGES = st.lists(CHANGE, max_size=2)
SNIPPETS = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n"),
    *(b"\t", b"\x1b[31m", b"\xe2\x80\xae", b"{", b"}", b"[", b"]"),
    *(b'"', b"'", b":", b": ", b"- ", b",", b"#", b"&a ", b"*a", b"!!"),
    *(b"? ", b"|", b"<<: ", b"---\n", b"...\n", b"%YAML 9.9\n"),
    *(b"NaN", b"-", b"1e999", b"9" * 5000, b"[" * 2000, b"{a: " * 2000),
    *(b"x" * 3000, b"\\u0000", b"\\ud800", b"null", b"true"),
)  # fmt: skip


def damaged(data: bytes, changes: Sequence[Change]) -> bytes:
    """Bytes flipped, cut, inserted, repeated, taken out, or zeroed."""
    for kind, place, length, put in changes:
        at = place * 7919 % (len(data) + 1)
        end = min(len(data), at + length % 64)
        snippet = SNIPPETS[put % len(SNIPPETS)]
        if kind % 7 == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << put % 8]) + data[at + 1 :]
        elif kind % 7 == 1:
            data = data[:at]
        elif kind % 7 in (2, 3):
            data = data[:at] + snippet + data[at:]
        elif kind % 7 == 4:
            data = data[:end] + data[at:end] * (1 + put % 50) + data[end:]
        elif kind % 7 == 5:
            data = data[:at] + data[end:]
        else:
            data = data[:at] + bytes(end - at) + data[end:]
    return data


def json_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """A JSON document changed by its structure."""
    root = [parsed(data.decode())]
    for change in changes:
        changed(root, change, ODD)
    return "".join(map(written, root)).encode("utf-8", "surrogatepass")


def yaml_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """A YAML document changed by its structure, written in the flow style."""
    root = [tree_of(yaml.safe_load(data.decode()))]
    for change in changes:
        changed(root, change, (*ODD, *ODD_YAML))
    lines = root[0].pairs if len(root) == 1 and isinstance(root[0], Object) else None
    if lines is None:
        return "".join(map(written, root)).encode("utf-8", "surrogatepass")
    text = "".join(f"{written(key) if isinstance(key, Raw) else key}: {written(value)}\n" for key, value in lines)
    return text.encode("utf-8", "surrogatepass")


def jsonl_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """Lines of JSON changed by their structure; checksums are made anew, that of line 1 unless a change is to it."""
    root = [parsed(line) for line in data.decode().splitlines()]
    for change in changes:
        changed(root, change, ODD)
    lines: list[str] = []
    for each in root:
        if isinstance(each, Object) and any(key == "finished" for key, _ in each.pairs):
            each.pairs = [pair if pair[0] != "sha256" else ["sha256", digest(lines[1:])] for pair in each.pairs]
        lines += written(each).splitlines() or [""]
    head = root[0] if root else None
    if isinstance(head, Object) and len(lines[0]) < 200:
        exported = [pair for pair in head.pairs if pair[0] != "sha256" or not isinstance(pair[1], str)]
        if exported != head.pairs:
            lines[0] = written(Object([*exported, ["sha256", digest("\n".join(lines[1:]).splitlines())]]))
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


METADATA = "loka.profile"
LENGTH = 8


def profile_bytes(data: bytes, changes: Sequence[Change]) -> bytes:
    """A safetensors file: the profile's header, the library's, or a tensor's values changed."""
    length = int.from_bytes(data[:LENGTH], "little")
    head, tensors = parsed(data[LENGTH : LENGTH + length].decode()), data[LENGTH + length :]
    outer = [head]
    metadata = next(pair[1] for pair in head.pairs if pair[0] == "__metadata__")
    text = next(pair for pair in metadata.pairs if pair[0] == METADATA)
    inner = [parsed(text[1])]
    for kind, *rest in changes:
        change = (kind // 8, rest[0], rest[1], rest[2])
        if kind % 8 < 5:
            changed(inner, change, ODD)
            text[1] = "".join(map(written, inner))
        elif kind % 8 < 7:
            changed(outer, change, ODD)
        elif tensors:
            at = rest[0] * 8 % len(tensors)
            value = (b"\xff" * 8, bytes(8), b"\x00" * 6 + b"\xf0\x7f", b"\x00" * 7 + b"\x80", b"\xff" * 7 + b"\x7f")
            tensors = tensors[:at] + value[rest[2] % len(value)] + tensors[at + 8 :]
    try:
        encoded = "".join(map(written, outer)).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    return len(encoded).to_bytes(LENGTH, "little") + encoded + tensors


Mutate = Callable[[bytes, Sequence[Change]], bytes]
