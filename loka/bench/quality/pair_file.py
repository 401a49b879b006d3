"""Finished pairs of a comparison in a file, so that one that was stopped goes on where it was.

A line of JSON for each pair, after a first line that names the comparison. A line that a kill has cut off is dropped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from loka.bench.quality.training import PairResult
from loka.errors import InputError

FORMAT: Literal[3] = 3
TRAIN_FOLDER = Path("build/train")  # below the current directory, as the next one
COMPARE_FOLDER = Path("build/compare")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the pairs of a file are of, for `loka report`."""

    plan: str  # `loka.plan.serialize.plan_sha256`
    device: str  # "cpu", "NVIDIA H200"
    against: str = "model"  # or "original": the model with its mods against the one without, both without FP8
    budget_percent: float | None = None  # of NE; None where nothing was judged
    shared_steps: int = 0  # the first steps, without FP8, from which both runs went on


@dataclass(frozen=True, slots=True)
class _Head:
    """The first line."""

    loka_compare: Literal[3]
    comparison: str
    about: RunFacts


_HEAD, _PAIR = TypeAdapter(_Head), TypeAdapter(PairResult)


@dataclass(frozen=True, slots=True)
class KeptPairs:
    """The pairs of a file, by seed and draw."""

    path: Path
    facts: RunFacts
    pairs: tuple[PairResult, ...]


class PairFile:
    """The pairs of one comparison. Raises InputError if the file is another comparison's, or is none of them."""

    def __init__(self, path: Path, comparison: str, facts: RunFacts) -> None:
        self.path = path
        self._head = _Head(FORMAT, comparison, facts)
        self._written = False
        self._pairs: dict[tuple[int, int], PairResult] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be used for pairs ({reason}); name another file") from error
        if lines:
            head = _head_of(lines[0])
            if head is None and any(f'"loka_compare": {earlier},' in lines[0] for earlier in range(1, FORMAT)):
                raise InputError(
                    f"{path}: holds pairs of an earlier LoKA, which are not read any more; delete it, and run loka "
                    "compare again"
                )
            if head is None or head.comparison != comparison:
                raise InputError(
                    f"{path}: holds the pairs of another comparison (other policy, settings, data or version); name "
                    "another file, or delete this one"
                )
            self._pairs = _pairs_of(lines[1:])

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, seed: int, draw: int) -> PairResult | None:
        """The pair of a seed and draw; None if it is not finished."""
        return self._pairs.get((seed, draw))

    def add(self, pair: PairResult) -> None:
        """Append a pair, on the disk before this returns.

        Raises InputError if it cannot be written, or saw other batches than another draw of its seed.
        """
        draws = [each for each in self._pairs.values() if each.seed == pair.seed and each.draw != pair.draw]
        if other := next((each for each in draws if each.batches != pair.batches), None):
            raise InputError(
                f"train.batches: seed {pair.seed}: draw {pair.draw} saw other batches than draw {other.draw}, which "
                f"{self.path} has: the data changed in between; delete that file, and run again"
            )
        self._pairs[pair.seed, pair.draw] = pair
        try:
            if self._written:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{_line(pair)}\n")
            else:  # all of it, or what follows would continue a line that was cut off; a kill leaves the old or the new
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self.path.with_name(f".{self.path.name}.new")
                lines = [_line(self._head), *map(_line, self._pairs.values())]
                fresh.write_text("".join(f"{line}\n" for line in lines), "utf-8")
                fresh.replace(self.path)
                self._written = True
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written ({error.strerror}); free space, or name another"
            ) from error


def read_pairs(path: Path) -> KeptPairs | None:
    """The pairs of any comparison's file; None if the file cannot be read, or is none."""
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    head, pairs = _head_of(first), _pairs_of(lines)
    return None if head is None else KeptPairs(path, head.about, tuple(pairs[key] for key in sorted(pairs)))


def _head_of(line: str) -> _Head | None:
    try:
        return _HEAD.validate_json(line, strict=True)
    except ValidationError:
        return None


def _line(value: _Head | PairResult) -> str:
    return json.dumps(asdict(value))


def _pairs_of(lines: list[str]) -> dict[tuple[int, int], PairResult]:
    """The pairs of the whole lines."""
    found = {}
    for line in lines:
        try:
            pair = _PAIR.validate_json(line, strict=True)
        except ValidationError:
            continue
        found[pair.seed, pair.draw] = pair
    return found
