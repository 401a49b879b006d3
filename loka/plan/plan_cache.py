"""Plans kept between processes, so that a verb on an unchanged policy traces nothing.

A plan is found again by everything that decides it: the policy's text, the sha256 of its profile and measurements, the
built model's structure, example inputs at two small batch sizes, and the versions of Python and torch. Beside the plan,
its file lists the source files that were loaded when it was made, LoKA's own among them; one that has changed since
makes the plan unknown. So does anything that cannot be described: the model is then planned each time.

Files are JSON with a checksum, read as data alone and only if nobody else can have written them; others are ignored,
and replaced. Writing is atomic. Where the folder cannot be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loka.errors import InputError
from loka.paths import open_plain
from loka.plan.loaded_sources import loaded_sources, unchanged
from loka.plan.plan import Plan
from loka.plan.prospect import Prospect
from loka.plan.serialize import from_json, to_json
from loka.version import __version__

FORMAT = "loka.plan_cache"
VERSION = 2
MOST_FILES, MOST_BYTES = 200, 256 << 20  # kept; the oldest are removed
_OFF = frozenset(("0", "off"))
_OTHERS_WRITE = 0o022  # mode bits


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan with the notes on finding its sites, and what FP8 would bring where it has none."""

    plan: Plan
    notes: tuple[str, ...] = ()
    prospect: Prospect | None = None
    gains: bool = False  # it has the gains of its mods
    prospects: bool = False  # a prospect was looked for
    ignored: str = ""  # why a record of `loka tune` was not used

    def narrowed(self, gains: bool, prospects: bool) -> KnownPlan | None:
        """What is wanted of it; None where it has less."""
        if (gains and not self.gains) or (prospects and not self.prospects):
            return None
        plan = self.plan if gains else _without_gains(self.plan)
        return KnownPlan(plan, self.notes, self.prospect if prospects else None, gains, prospects, self.ignored)


@dataclass(frozen=True, slots=True)
class PlanCache:
    """The plans in a folder, which is created when one is kept."""

    folder: Path

    @classmethod
    def default(cls, wanted: bool = True) -> PlanCache | None:
        """That of the environment: LOKA_CACHE (off: None), else loka in XDG_CACHE_HOME, else ~/.cache/loka.

        None too if none is `wanted`.
        """
        named = os.environ.get("LOKA_CACHE", "")
        if not wanted or named.lower() in _OFF:
            return None
        base = os.environ.get("XDG_CACHE_HOME", "")
        home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~"), ".cache")
        return cls(Path(named or home / "loka") / "plans")

    def find(self, key: str, gains: bool, prospects: bool) -> KnownPlan | None:
        """The plan under a key if its sources are unchanged, with what is wanted; None if it has less."""
        path = self._path(key)
        try:
            data = _read(path)
            if data is None or data["key"] != key or not unchanged(data["sources"]):
                return None
            prospect = None if data["prospect"] is None else Prospect(**data["prospect"])
            plan = from_json(data["plan"], str(path))
            beside = (data["gains"], data["prospects"], data["ignored"])
            known = KnownPlan(plan, tuple(data["notes"]), prospect, *beside)
            os.utime(path)  # the oldest files are those that were not used for longest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError):
            return None
        return known.narrowed(gains, prospects)

    def keep(self, key: str, known: KnownPlan) -> None:
        """Write a plan under a key, in place of what is there; where that fails, nothing is kept."""
        sources = loaded_sources()
        if sources is None:
            return
        prospect = None if known.prospect is None else asdict(known.prospect)
        held: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "key": key,
            "sources": sources,
            "plan": to_json(known.plan),
            "notes": known.notes,
            "prospect": prospect,
            "gains": known.gains,
            "prospects": known.prospects,
            "ignored": known.ignored,
        }
        text = json.dumps(held)
        with contextlib.suppress(OSError, ValueError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".", dir=self.folder)  # mode 0600
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(f"{_checksum(text)}\n{text}")
                os.replace(temporary, self._path(key))
            except BaseException:
                os.unlink(temporary)
                raise
            self._remove_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _remove_oldest(self) -> None:
        about = [(path, path.stat()) for path in self.folder.glob("*.json")]
        kept = size = 0
        for path, stat in sorted(about, key=lambda each: each[1].st_mtime_ns, reverse=True):
            kept, size = kept + 1, size + stat.st_size
            if kept > MOST_FILES or size > MOST_BYTES:
                path.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    """The data of a file that this user alone can have written and that is whole; None for any other."""
    with open_plain(path) as file:
        about = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & _OTHERS_WRITE):
            return None
        checksum, _, text = file.read().decode().partition("\n")
    if checksum != _checksum(text):
        return None
    data = json.loads(text)
    return data if data["format"] == FORMAT and data["version"] == VERSION else None


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_gains(plan: Plan) -> Plan:
    return replace(plan, mods=tuple(replace(mod, gain=None) for mod in plan.mods))


def key_of(parts: Mapping[str, object]) -> str:
    """The name of what decides a plan: sha256 of the parts, and of the versions of LoKA, Python and torch."""
    versions = (VERSION, __version__, sys.version, str(torch.__version__), str(torch.version.git_version))
    text = json.dumps([versions, torch.backends.cpu.get_cpu_capability(), parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
