"""Profile files: one safetensors file with a JSON header, in one of two forms.

The summary form has the data for planning; the full form also has the statistics, and can be merged. Both have the
header (header.py) as the file's metadata under `loka.profile` and the magnitudes of all operands as one tensor; the
full form's further tensors are named `sites/12/input/moments/mean`, by the index of the site in the header
(stat_tensors.py). The metadata also has a checksum of the whole file (checksum.py); files of version 1 have none.

Reading executes no code and allocates no more than the size of the file. Equal contents make equal bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from loka.errors import InputError, UncheckedWarning
from loka.paths import check_replaceable, open_plain, resolved_path
from loka.probe.profile import header, stat_tensors
from loka.probe.profile.checksum import LENGTH, is_whole, with_checksum
from loka.probe.profile.header import Parsed
from loka.probe.profile.profile import Profile
from loka.probe.profile.stat_tensors import ExpectedTensor
from loka.probe.stats.bins import MAGNITUDE_BINS
from loka.probe.stats.site_stats import RecordedStats, SiteStats

METADATA = "loka.profile"
MAGNITUDES = "magnitudes"
HEADER_LIMIT = 100_000_000  # bytes; safetensors rejects longer headers
FIRST_WITH_CHECKSUM = 2
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64}
_AGAIN = "make it again with `loka probe`, or take it from where it was kept"


def save(path: str | Path, recorded: RecordedStats | Profile, largest: float = math.inf) -> int:
    """Write a profile, in full for a `RecordedStats`, otherwise its summary; missing folders are created.

    Returns its size in bytes; one of more than `largest` is not written. The file at `path` is replaced only when the
    new one is complete on the disk. Raises InputError if writing fails, or if a number is NaN, or infinite where that
    is not allowed.
    """
    path = Path(path)
    try:
        data = _to_bytes(recorded)
    except InputError as error:
        raise InputError(f"{path}: the profile was not saved: {error}") from error
    size = sum(memoryview(part).nbytes for part in data)
    if size > largest:
        return size
    try:
        _replace(path, *data)
    except OSError as error:
        raise InputError(
            f"{path}: cannot write the profile: {error.strerror or error}; free space or choose another place; what "
            "was there before is still there"
        ) from error
    return size


def check_replaceable_by_profile(path: str | Path, option: str = "-o") -> None:
    """Raise InputError where saving a profile would replace a file of another kind."""
    check_replaceable(path, "a profile", lambda head: b'"loka.' in head, option)


def load(path: str | Path) -> RecordedStats | Profile:
    """Read a profile in the form that it has.

    Raises InputError for a file that is missing, truncated, damaged, something else, or written by a newer LoKA. Warns
    with UncheckedWarning if the file is too old to have a checksum.
    """
    path = Path(path)
    with _open(path) as (file, checked):
        parsed = _profile(path, file, checked)
        if parsed.stats is None:
            return parsed.profile
        return RecordedStats(parsed.profile, _stats(path, file, parsed))


def load_profile(path: str | Path) -> Profile:
    """Read the summary of a profile in either form, without the statistics of a full one.

    Raises and warns as `load`.
    """
    path = Path(path)
    with _open(path) as (file, checked):
        return _profile(path, file, checked).profile


def _to_bytes(recorded: RecordedStats | Profile) -> tuple[bytes, memoryview]:
    """The file in two parts."""
    profile = recorded.profile if isinstance(recorded, RecordedStats) else recorded
    stats = recorded.stats if isinstance(recorded, RecordedStats) else None
    contents = {MAGNITUDES: _magnitudes(profile)}
    counts = None
    if stats is not None:
        _check_stats(profile, stats)
        counts = tuple(stat_tensors.site_counts(site) for site in stats)
        for number, site in enumerate(stats):
            for part, tensor, expected in stat_tensors.site_tensors(site):
                name = f"sites/{number}/{part}"
                contents[name] = stat_tensors.prepared(f"site {site.name!r}: {part}", tensor, expected)
    text = header.to_text(profile, counts)
    start, tensors = with_checksum(to_bytes(_apart(contents), {METADATA: text}))
    length = len(start) - LENGTH
    if length > HEADER_LIMIT:
        raise InputError(f"its header has {length} bytes, more than the {HEADER_LIMIT} that can be read back")
    return start, tensors


def _apart(contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors sorted by name, none sharing memory with another, which the library cannot write."""
    apart, seen = {}, set()
    for name in sorted(contents):
        tensor = contents[name]
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


def _magnitudes(profile: Profile) -> Tensor:
    rows = []
    for site in profile.sites:
        for operand in site.operands:
            if len(operand.magnitudes) != MAGNITUDE_BINS:
                raise InputError(
                    f"site {site.name!r}: magnitudes of {operand.operand} have {len(operand.magnitudes)} bins, "
                    f"not {MAGNITUDE_BINS}"
                )
            rows.append(operand.magnitudes)
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), MAGNITUDE_BINS)


def _check_stats(profile: Profile, stats: tuple[SiteStats, ...]) -> None:
    mine = [(site.name, site.k, site.n) for site in profile.sites]
    if mine != [(site.name, site.k, site.n) for site in stats]:
        raise InputError("the sites of its statistics are not those of its summary, in the same order")


def _replace(path: Path, *parts: bytes | memoryview) -> None:
    """Write a temporary file next to the path, sync it, then rename: a reader sees the old file or the new one."""
    path = resolved_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # leaves nothing behind after Ctrl-C either
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync the rename itself. Some file systems cannot; the file is complete in any case."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, bool]]:
    """Opens the file with the library, its tensors unread; and says if it has a checksum, which is correct then."""
    try:
        damage = _damage(path)
        if damage is not None:
            raise InputError(f"{path}: {damage}")
        with safe_open(path, framework="pt") as file:  # refuses a file of another length than its header says
            whole = is_whole(path)
            if whole is False:
                raise InputError(f"{path}: the profile is damaged: its checksum does not match; {_AGAIN}")
            yield file, whole is not None
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such profile; make one with `loka probe POLICY`") from error
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the profile: {error.strerror or error}; check the path and its permissions"
        ) from error
    except SafetensorError as error:
        raise InputError(f"{path}: the profile is damaged or was cut short ({error}); {_AGAIN}") from error


def _damage(path: Path) -> str | None:
    """Damage that is visible from a file's length and its first bytes, in words; None without any."""
    with open_plain(path, largest=None) as file:
        start = file.read(LENGTH + 1)
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        return f"the file is empty; {_AGAIN}"
    if size <= LENGTH:
        return f"the file was cut short, or is no profile ({size} bytes); {_AGAIN}"
    length = int.from_bytes(start[:LENGTH], "little")
    if length > HEADER_LIMIT or start[LENGTH:] != b"{":
        return "not a profile of LoKA (no safetensors file); name what `loka probe` wrote"
    if size < LENGTH + length:
        return f"the profile was cut short: {size} bytes of at least {LENGTH + length}; {_AGAIN}"
    return None


def _profile(path: Path, file: Any, checked: bool) -> Parsed:
    text = (file.metadata() or {}).get(METADATA)
    if text is None:
        raise InputError(
            f"{path}: a safetensors file, but not a profile of LoKA; name what `loka probe` wrote, not a checkpoint"
        )
    parsed = header.from_text(text, str(path))
    if not checked and parsed.version >= FIRST_WITH_CHECKSUM:
        raise InputError(f"{path}: the profile is damaged: it lacks its checksum; {_AGAIN}")
    if not checked:
        warnings.warn(
            f"{path}: written by an earlier LoKA, without a checksum: damage to it cannot be detected; a profile that "
            "`loka probe` writes now has one",
            UncheckedWarning,
            stacklevel=3,
        )
    rows = sum(len(site.operands) for site in parsed.profile.sites)
    counts = _read(path, file, MAGNITUDES, ExpectedTensor((rows, MAGNITUDE_BINS), torch.int64))
    return replace(parsed, profile=header.with_magnitudes(parsed.profile, counts.tolist()))


def _stats(path: Path, file: Any, parsed: Parsed) -> tuple[SiteStats, ...]:
    def reader(number: int) -> stat_tensors.Read:
        return lambda part, expected: _read(path, file, f"sites/{number}/{part}", expected)

    return tuple(
        stat_tensors.site_stats(site, counts, reader(number))
        for number, (site, counts) in enumerate(zip(parsed.profile.sites, parsed.stats or (), strict=True))
    )


def _read(path: Path, file: Any, name: str, expected: ExpectedTensor) -> Tensor:
    """One tensor, checked before it is read, and copied: it does not change with the file."""
    try:
        found = file.get_slice(name)
    except SafetensorError as error:
        raise InputError(f"{path}: the tensor {name} is missing; {_AGAIN}") from error
    dtype = _DTYPES.get(found.get_dtype())
    if dtype is None:
        raise InputError(f"{path}: the tensor {name} is {found.get_dtype()}, but must be {expected.dtype}; {_AGAIN}")
    mismatch = expected.mismatch(tuple(found.get_shape()), dtype)
    if mismatch is None:
        tensor: Tensor = file.get_tensor(name).clone()
        mismatch = expected.bad_values(tensor)
        if mismatch is None:
            return tensor
    raise InputError(f"{path}: the tensor {name} {mismatch}; {_AGAIN}")
