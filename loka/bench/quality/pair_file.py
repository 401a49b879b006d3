"""Finished pairs of a comparison in a file, so that one that was stopped goes on where it was.

A line of JSON for each pair, after a first line that names the comparison. A line that a kill has cut off is dropped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from loka.bench.quality.training import PairResult, TrainResult
from loka.errors import InputError

FORMAT = 1
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
class KeptPairs:
    """The pairs of a file, by seed and draw. `facts` is None in a file of an earlier LoKA."""

    path: Path
    facts: RunFacts | None
    pairs: tuple[PairResult, ...]


class PairFile:
    """The pairs of one comparison. Raises InputError if the file is another comparison's, or is none of them."""

    def __init__(self, path: Path, comparison: str, facts: RunFacts | None = None) -> None:
        self.path = path
        self._head = json.dumps(_head(comparison) | ({"about": asdict(facts)} if facts is not None else {}))
        self._written = False
        self._pairs: dict[tuple[int, int], PairResult] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be used for pairs ({reason}); name another file") from error
        if lines and not _is_head(lines[0], comparison):
            raise InputError(
                f"{path}: holds the pairs of another comparison (other policy, settings, data or version); name "
                "another file, or delete this one"
            )
        for line in lines[1:]:
            if (pair := _read(line)) is not None:
                self._pairs[pair.seed, pair.draw] = pair

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, seed: int, draw: int) -> PairResult | None:
        """The pair of a seed and draw; None if it is not finished."""
        return self._pairs.get((seed, draw))

    def add(self, pair: PairResult) -> None:
        """Append a pair, on the disk before this returns. Raises InputError if it cannot be written."""
        self._pairs[pair.seed, pair.draw] = pair
        try:
            if self._written:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{_line(pair)}\n")
            else:  # all of it, or what follows would continue a line that was cut off; a kill leaves the old or the new
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self.path.with_name(f".{self.path.name}.new")
                fresh.write_text(
                    "".join(f"{line}\n" for line in [self._head, *map(_line, self._pairs.values())]), "utf-8"
                )
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
        head = json.loads(first)
        if not isinstance(head, dict) or head.get("loka_compare") != FORMAT:
            return None
        facts = _facts(head["about"]) if "about" in head else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    pairs = {(pair.seed, pair.draw): pair for line in lines if (pair := _read(line)) is not None}
    return KeptPairs(path, facts, tuple(pairs[key] for key in sorted(pairs)))


def _facts(about: object) -> RunFacts:
    """The facts of a first line. Raises TypeError or KeyError where they are others."""
    if not isinstance(about, dict):
        raise TypeError("no facts")
    facts = RunFacts(
        about["plan"], about["device"], about["against"], about["budget_percent"], about.get("shared_steps", 0)
    )
    texts = (facts.plan, facts.device, facts.against)
    if not all(isinstance(each, str) for each in texts) or not isinstance(facts.shared_steps, int):
        raise TypeError("other facts")
    if not isinstance(facts.budget_percent, int | float | None):
        raise TypeError("other facts")
    return facts


def _head(comparison: str) -> dict[str, object]:
    return {"loka_compare": FORMAT, "comparison": comparison}


def _is_head(line: str, comparison: str) -> bool:
    """True if a first line names this comparison; what else it says may differ, as between versions."""
    try:
        head = json.loads(line)
    except ValueError:
        return False
    return isinstance(head, dict) and head.items() >= _head(comparison).items()


def _line(pair: PairResult) -> str:
    return json.dumps(asdict(pair))


def _read(line: str) -> PairResult | None:
    """The pair of a line; None if the line is not whole."""
    try:
        data = json.loads(line)
        as_is, patched = (_result(data[key]) for key in ("as_is", "patched"))
        return PairResult(data["seed"], as_is, patched, data["draw"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _result(data: dict[str, object]) -> TrainResult:
    curve = data.pop("train_loss")
    if not isinstance(curve, list):
        raise TypeError("train_loss is no list")
    if not all(isinstance(each, int | float) for each in (*curve, *data.values())):
        raise TypeError("a figure is no number")
    return TrainResult(train_loss=tuple(curve), **data)  # type: ignore[arg-type]  # checked by the caller's except
