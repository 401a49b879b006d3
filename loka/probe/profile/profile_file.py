"""Profile files: a JSON header in a safetensors file, in one of two forms.

The summary form has the data for planning; the full form also has the statistics, and can be merged. The header is the
file's metadata under `loka.profile`: a `Profile` and, in the full form, its `SiteStats`, whose tensors are the file's,
by number. The tensor `sha256` is the checksum of the header, `sha256_full` that of the header and the statistics: the
summary of a full file is checked without reading its statistics.

Reading executes no code and allocates little more than the size of the file. Equal contents make equal bytes.
Numbers, shapes and values are checked, whoever wrote the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.paths import check_replaceable, open_plain, write_file
from loka.probe.profile.profile import Profile, RecordedStats
from loka.probe.stats.site_stats import (
    JOINT,
    VALUE_BINS,
    WEIGHT_ROWS,
    LowRank,
    Moments,
    SiteStats,
    comoment_columns,
    count_shapes,
)

VERSION = 3  # of the layout; no other is read
METADATA = "loka.profile"
CHECKSUM, FULL_CHECKSUM = "sha256", "sha256_full"
HEADER_LIMIT = 100_000_000  # bytes; safetensors rejects longer headers
_AGAIN = "make it again with `loka probe`, or take it from where it was kept"


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")

    version: Literal[3]
    profile: Profile
    stats: Any  # checked in `_FullHeader` alone


class _FullHeader(_Header):
    stats: tuple[SiteStats, ...] | None  # one for each of the profile's sites; None in the summary form


class _Version(BaseModel):
    version: int


_Model = TypeVar("_Model", bound=BaseModel)


def save(path: str | Path, recorded: RecordedStats | Profile, largest: float = math.inf) -> int:
    """Write a profile, in full for a `RecordedStats`, otherwise its summary; missing folders are created.

    Returns its size in bytes. One whose tensors and header have more than `largest` is neither made nor written, and
    their size is returned. The file at `path` is replaced only when the new one is complete on the disk. Raises
    InputError if writing fails, or if a number is NaN, or infinite where that is not allowed.
    """
    path = Path(path)
    try:
        text, tensors = _contents(recorded)
        size = len(text) + sum(tensor.nbytes for tensor in tensors.values())
        data = None if size > largest else _to_bytes(text, tensors)
    except InputError as error:
        raise InputError(f"{path}: the profile was not saved: {error}") from error
    if data is None:
        return size
    write_file(path, data)
    return len(data)


def check_replaceable_by_profile(path: str | Path, option: str = "-o") -> None:
    """Raise InputError where saving a profile would replace a file of another kind."""
    check_replaceable(path, "a profile", lambda head: b'"loka.' in head, option)


def load(path: str | Path) -> RecordedStats | Profile:
    """Read a profile in the form that it has.

    Raises InputError for a file that is missing, truncated, damaged, something else, or of another version.
    """
    path = Path(path)
    text, tensors = _read(path)
    with _as_damage(path):
        header = _checked(text, tensors)
    return header.profile if header.stats is None else RecordedStats(header.profile, header.stats)


def load_profile(path: str | Path) -> Profile:
    """Read the summary of a profile in either form, not its statistics. Raises as `load`."""
    path = Path(path)
    text, _ = _read(path, tensors_too=False)
    with _as_damage(path):
        return _validated(_Header, text).profile


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: the profile is damaged: {error}; {_AGAIN}") from error


def _contents(recorded: RecordedStats | Profile) -> tuple[str, dict[str, Tensor]]:
    """The header and its tensors. Raises InputError for what could not be read back."""
    whole = (recorded.profile, recorded.stats) if isinstance(recorded, RecordedStats) else (recorded, None)
    header = _FullHeader.model_construct(version=VERSION, profile=whole[0], stats=whole[1])
    tensors: dict[str, Tensor] = {}
    text = header.model_dump_json(context=tensors, exclude_defaults=True)
    _checked(text, dict(tensors))
    return text, tensors


def _to_bytes(text: str, tensors: dict[str, Tensor]) -> bytes:
    data: bytes = to_bytes({**tensors, **_checksums(text, tensors)}, {METADATA: text})
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_LIMIT:
        raise InputError(f"its header has {length} bytes, more than the {HEADER_LIMIT} that can be read back")
    return data


def _validated(kind: type[_Model], text: str, tensors: dict[str, Tensor] | None = None) -> _Model:
    try:
        return kind.model_validate_json(text, context=tensors)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{place}: {first['msg']}" if place else first["msg"]) from error


def _checked(text: str, tensors: dict[str, Tensor]) -> _FullHeader:
    """The header with its tensors. Raises InputError where a Probe would not write it."""
    header = _validated(_FullHeader, text, tensors)
    if header.stats is not None:
        mine = [(site.name, site.k, site.n) for site in header.profile.sites]
        if mine != [(site.name, site.k, site.n) for site in header.stats]:
            raise InputError("the sites of its statistics are not those of its summary, in the same order")
        for site in header.stats:
            check_tensors(site)
    return header


def _checksums(text: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sha256 of a header, and with any tensors that of both, (32,) uint8 each, by the names in the file."""
    digest = hashlib.sha256(text.encode())
    found = {CHECKSUM: digest.digest()}
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    if tensors:
        found[FULL_CHECKSUM] = digest.digest()
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found.items()}


def _read(path: Path, tensors_too: bool = True) -> tuple[str, dict[str, Tensor]]:
    """The header and the tensors of a profile of this version, as they were written."""
    with _open(path) as file:
        text = (file.metadata() or {}).get(METADATA)
        if text is None:
            raise InputError(
                f"{path}: a safetensors file, but not a profile of LoKA; name what `loka probe` wrote, not a checkpoint"
            )
        _check_version(path, text)
        names = [name for name in file.keys() if tensors_too or name == CHECKSUM]  # noqa: SIM118 - it has no iterator
        tensors = {name: file.get_tensor(name).clone() for name in names}
    stored = {name: tensors.pop(name) for name in (CHECKSUM, FULL_CHECKSUM) if name in tensors}
    sums = _checksums(text, tensors)
    if stored.keys() != sums.keys() or not all(torch.equal(stored[name], sums[name]) for name in sums):
        raise InputError(f"{path}: the profile is damaged: its checksum does not match; {_AGAIN}")
    return text, tensors


def _check_version(path: Path, text: str) -> None:
    with _as_damage(path):
        version = _validated(_Version, text).version
    if version < VERSION:
        raise InputError(
            f"{path}: a profile of an earlier LoKA (version {version}, and this one reads {VERSION}); make it again: "
            "loka probe POLICY"
        )
    if version > VERSION:
        raise InputError(
            f"{path}: a profile of a newer LoKA (version {version}, and this one reads {VERSION}); upgrade LoKA, or "
            "make it again: loka probe POLICY"
        )


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Opens the file with the library, its tensors unread."""
    try:
        with open_plain(path, largest=None) as plain:
            start = plain.read(9)
        if not start:
            raise InputError(f"{path}: the file is empty; {_AGAIN}")
        if start[8:] != b"{":
            raise InputError(f"{path}: not a profile of LoKA (no safetensors file); name what `loka probe` wrote")
        with safe_open(path, framework="pt") as file:  # refuses a file of another length than its header says
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such profile; make one with `loka probe POLICY`") from error
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the profile: {error.strerror or error}; check the path and its permissions"
        ) from error
    except SafetensorError as error:
        raise InputError(f"{path}: the profile is damaged or was cut short ({error}); {_AGAIN}") from error


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the tensors of one kind: `below` is of indices; not `signed` are maxima and sums of squares."""

    dtype: torch.dtype
    below: int | None = None
    finite: bool = True
    signed: bool = True

    def wrong(self, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
        """The first error of a tensor, in words; None if it is as expected."""
        if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            return f"is {tensor.dtype} of shape {tuple(tensor.shape)}, but must be {self.dtype} of shape {shape}"
        if not tensor.numel():
            return None
        if self.finite and not bool(tensor.isfinite().all()):
            return "holds NaN or infinity"
        if not self.signed and float(tensor.min()) < 0:
            return "holds a negative number"
        if self.below is not None and int(tensor.max()) >= self.below:
            return f"holds {int(tensor.max())}, but must stay below {self.below}"
        return None


COUNTS = Expected(torch.int64, signed=False)
REAL = Expected(torch.float64)
POSITIVE = Expected(torch.float64, signed=False)
ELEMENTS = Expected(torch.float32, finite=False)  # of a weight, unmodified

_Row = tuple[str, Tensor, tuple[int, ...], Expected]


def check_tensors(stats: SiteStats) -> None:
    """Raise InputError at the first tensor of a site's statistics that no Probe writes."""
    for name, tensor, shape, expected in _rows(stats):
        wrong = expected.wrong(tensor, shape)
        if wrong is not None:
            raise InputError(f"site {stats.name!r}: {name} {wrong}")


def _rows(stats: SiteStats) -> Iterator[_Row]:
    k, n = stats.k, stats.n
    for operand, seen, width in ((Operand.INPUT, stats.input, k), (Operand.GRAD_OUTPUT, stats.grad_output, n)):
        if seen is None:
            continue
        if seen.operand is not operand:
            raise InputError(f"site {stats.name!r}: the statistics of its {operand} are of its {seen.operand}")
        for part, shape in count_shapes(width).items():
            yield f"{operand}/{part}", getattr(seen, part), shape, COUNTS
        yield f"{operand}/column_amax", seen.column_amax, (width,), POSITIVE
        yield from _moments(f"{operand}/moments", seen.moments, width)
    if (joint := stats.joint) is not None:
        yield from _indices("joint/input_features", joint.input_features, JOINT, k)
        yield from _indices("joint/grad_features", joint.grad_features, JOINT, n)
        yield from _moments("joint/moments", joint.moments, joint.input_features.numel() + joint.grad_features.numel())
    if (weight := stats.weight) is not None:
        yield from _indices("weight/row_index", weight.row_index, WEIGHT_ROWS, n)
        yield from _indices("weight/column_index", weight.column_index, WEIGHT_ROWS, k)
        yield "weight/rows", weight.rows, (weight.row_index.numel(), k), ELEMENTS
        yield "weight/columns", weight.columns, (n, weight.column_index.numel()), ELEMENTS
        yield "weight/row_mean", weight.row_mean, (n,), REAL
        yield "weight/column_mean", weight.column_mean, (k,), REAL
        yield "weight/row_amax", weight.row_amax, (n,), POSITIVE
        yield "weight/column_amax", weight.column_amax, (k,), POSITIVE
        yield "weight/values", weight.values, (VALUE_BINS,), COUNTS
        yield from _low_rank("weight/u", weight.u, n)
        yield from _low_rank("weight/v", weight.v, k)


def _indices(name: str, index: Tensor, most: int, below: int) -> Iterator[_Row]:
    yield name, index, (min(index.numel(), most, below),), Expected(torch.int64, below=below, signed=False)


def _moments(name: str, moments: Moments, width: int) -> Iterator[_Row]:
    yield f"{name}/mean", moments.mean, (width,), REAL
    yield f"{name}/diagonal", moments.diagonal, (width,), POSITIVE
    yield f"{name}/comoment", moments.comoment, (width, comoment_columns(width)), REAL


def _low_rank(name: str, found: LowRank, size: int) -> Iterator[_Row]:
    yield f"{name}/factor", found.factor, (size, min(found.factor.shape[-1], size)), REAL
    yield f"{name}/diagonal", found.diagonal, (size,), POSITIVE
