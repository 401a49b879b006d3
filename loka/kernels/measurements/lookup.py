"""Times and errors of parts on a target, looked up in measurements: the `PartCosts` of the planner.

Measurements come from a file that a policy names, or from the set that ships for the target, always those of one
machine (`measurement_choice`). A part that was not measured is interpolated from measured ones of its kind: the same
work, kernel, dtype, recipe, and norm or activation. The rules:

- Each measured time is a multiple of its part's bound (`part_bounds`): bytes at the device's bandwidth or FLOPs at its
  peak, whichever takes longer, plus the start of a kernel. The logarithm of this multiple is interpolated linearly in
  the logarithms of rows, columns and a GEMM's contraction, between measured neighbours within a factor of four on
  either side. The time is this multiple times the bound of the part, clamped to the times of those neighbours.
  INTERPOLATED. Interpolating the times themselves gives values 3 to 5 % too high for GEMMs (held-out measurements of an
  H100, `held_out_times`): between the regime of the start and that of the FLOPs they are convex, and so is the bound.
- Where a side has no such neighbour, outside the measured range or in a gap, the multiple at the nearest point of the
  range is used; but the part takes no longer than one that is larger in one size and that is interpolated.
  EXTRAPOLATED.
- Sizes whose rows are not multiples of 16 bytes have other kernels, or are padded: there is no interpolation between
  them and aligned ones (on an H100, 8192 x 1024 x 479 in BF16 takes 69 us, x 480 18 us). Few of them were measured.
  Beyond these the time is that of an aligned part of the same sizes, times what the nearest unaligned one takes over
  an aligned one: by their bounds, the slow products of 479 columns would speak for those of 6. Where only the others
  were measured, their time is taken. EXTRAPOLATED.
- The spread is the largest of the times that were used, combined, as the root of the sum of squares, with what a single
  recording does not show: another recording on the same H100 an hour later gave times that differ by up to 1 % for
  three parts in four (`DRIFT`), and held-out times differ by 2.6 to 4.9 % in the mean from those looked up
  (`HELD_OUT`). Without it, ties would be too narrow, and decisions would depend on the recording.
- A kernel with wrong results at a part has no time there, nor where such a part is the nearest measured one, and its
  times are used nowhere.
- If nothing of the kind was measured, the result is None. But an interaction has many kinds, one for each form: the
  nearest measured form of the same work and kernel is used, scaled by the ratio of bytes, as ESTIMATED.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot, log
from pathlib import Path
from typing import Any

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT, spec_of
from loka.kernels.measurements.interaction_forms import unlike
from loka.kernels.measurements.interpolate import Table, axes_of
from loka.kernels.measurements.measurement import MeasuredSet, Measurement, PartSeries, digest, size_words
from loka.kernels.measurements.part_bounds import bound_us, is_aligned
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartCosts, PartTime, TimeSource, less_sure
from loka.kernels.measurements.recording import Recording, export, lines_of, read_file, shipped_file
from loka.kernels.measurements.versions import Versions, difference

__all__ = ["Measurement", "Measurements", "Recording", "Versions", "export"]

DRIFT = 0.01  # relative change of a measured time from one recording to the next
HELD_OUT = 0.035  # relative error of a time that is interpolated or extrapolated
_SHIPPED_AGAIN = "it came with LoKA: install LoKA again, or name a file of your own in the policy (`measurements:`)"


@dataclass(slots=True)
class _Known:
    """The measurements of one kind, with right and with wrong results, by alignment."""

    device: DeviceSpec
    right: dict[bool, list[Measurement]] = field(default_factory=dict)
    wrong: dict[bool, list[Measurement]] = field(default_factory=dict)
    tables: dict[tuple[bool, bool], Table] = field(default_factory=dict)  # by (right, aligned), built on demand
    sizes: dict[bool, dict[str, list[int]]] = field(default_factory=dict)  # measured, by alignment, on demand

    def table(self, right: bool, aligned: bool) -> Table | None:
        """The table of one sort; None where there is none."""
        return self._table(right, aligned) if aligned in (self.right if right else self.wrong) else None

    def _table(self, right: bool, aligned: bool) -> Table:
        if (right, aligned) not in self.tables:
            found = (self.right if right else self.wrong)[aligned]
            self.tables[right, aligned] = Table.of(found, self.device)
        return self.tables[right, aligned]

    def right_table(self, part: Part) -> Table | None:
        """Table of right results for a part: of its alignment, otherwise of the other."""
        aligned = is_aligned(part)
        return self.table(True, aligned) or self.table(True, not aligned)

    def between(self, part: Part, aligned: bool) -> tuple[float, float] | None:
        """Time and spread interpolated between measured parts of an alignment; None where none are near."""
        table = self.table(True, aligned)
        near = table.between(axes_of(part)) if table is not None else None
        if near is None:
            return None
        return min(max(near.share * bound_us(part, self.device), near.least), near.most), near.spread

    def beyond(self, part: Part) -> tuple[float, float]:
        """Time and spread extrapolated from right results, of which there are some."""
        aligned = is_aligned(part)
        if not aligned and True in self.right and False in self.right:
            nearest = self._table(True, False).nearest(axes_of(part))[1]
            us, spread = self._by_sizes(part, True)
            return us * nearest.us / self._by_sizes(nearest.part, True)[0], max(spread, nearest.spread)
        return self._by_sizes(part, aligned if aligned in self.right else not aligned)

    def _by_sizes(self, part: Part, aligned: bool) -> tuple[float, float]:
        """Time and spread by the measured parts of one alignment, interpolated or at the edge of their range."""
        between = self.between(part, aligned)
        if between is not None:
            return between
        edge = self._table(True, aligned).beside(axes_of(part))
        return min([edge.share * bound_us(part, self.device), *self._larger(part, aligned)]), edge.spread

    def _larger(self, part: Part, aligned: bool) -> Iterator[float]:
        """For each size, the interpolated time of the next part that is larger in it, if there is one.

        Where a size is outside the measured range, there are none in the others.
        """
        sizes = self._sizes(aligned)
        outside = {name for name, values in sizes.items() if not values[0] <= getattr(part, name) <= values[-1]}
        for name, values in sizes.items():
            for value in values[bisect_right(values, getattr(part, name)) :] if outside <= {name} else ():
                change: dict[str, Any] = {name: value}
                found = self.between(replace(part, **change), aligned)
                if found is not None:
                    yield found[0]
                    break

    def _sizes(self, aligned: bool) -> dict[str, list[int]]:
        """The measured sizes of an alignment, sorted, by the field of a part."""
        if aligned not in self.sizes:
            parts = [each.part for each in self.right[aligned]]
            names = ("rows", "columns", "contraction")
            self.sizes[aligned] = {name: sorted({getattr(each, name) for each in parts}) for name in names}
        return self.sizes[aligned]

    def alignment(self, part: Part) -> bool:
        """Alignment of the measurements used for a part, right or wrong: its own, if any were measured."""
        aligned = is_aligned(part)
        return aligned if aligned in self.right or aligned in self.wrong else not aligned


class Measurements(PartCosts):
    """Measured parts of one machine, in memory, read-only."""

    def __init__(self, measured: MeasuredSet, name: str, device: DeviceSpec = DEFAULT) -> None:
        """From a set of measurements; `device` is the device they were taken on."""
        self.device = device
        self.name = name  # of the file, as plans name it
        self._set = measured
        self.machine = measured.machine
        self.libraries = dict(measured.libraries)
        self.date = measured.date
        self.others = measured.others
        self._exact: dict[Part, Measurement] = {each.part: each for each in measured.measurements}
        self._known: dict[PartSeries, _Known] = {}
        self._times: dict[Part, PartTime | None] = {}
        for each in self._exact.values():
            known = self._known.setdefault(PartSeries.of(each.part), _Known(device))
            side = known.wrong if each.wrong else known.right
            side.setdefault(is_aligned(each.part), []).append(each)

    @classmethod
    def open(cls, path: str | os.PathLike[str], target: str, name: str | None = None) -> Measurements:
        """The measurements for a target in a file of `loka bench kernels`: a recording, or a file exported from it.

        `name` is the file's name in plans, by default the last component of the path.

        Raises InputError where the file is missing, damaged, something else, of another version, or has nothing for the
        target.
        """
        path = Path(path)
        return cls(read_file(path, target), name or path.name, spec_of(target))

    @classmethod
    def shipped(cls, target: str) -> Measurements | None:
        """The set that ships for a target; None where there is none. Raises InputError where it is damaged."""
        path = shipped_file(target)
        if not path.exists():
            return None
        return cls(read_file(path, target, _SHIPPED_AGAIN), f"{path.name} of LoKA", spec_of(target))

    @classmethod
    def of(cls, measurements: Iterable[Measurement], machine: Versions, name: str = "measurements") -> Measurements:
        """From measurements in memory. Raises InputError where a figure makes no sense."""
        kept = []
        for each in measurements:
            each.check()
            kept.append(each.rounded())
        return cls(MeasuredSet.of(machine, (), "", kept), name)

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """All measurements, in the order of their kinds and sizes."""
        return self._set.measurements

    def __len__(self) -> int:
        return len(self._exact)

    @cached_property
    def sha256(self) -> str:
        """sha256 of its measurements: the same for a recording and the file exported from it."""
        return digest(lines_of(self._set))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The measured parts, with right or wrong results."""
        return tuple(self._exact)

    def time(self, part: Part) -> PartTime | None:
        """A part's time by the rules above; None where nothing of its kind was measured, or its results are wrong."""
        if part not in self._times:
            self._times[part] = self._time(part)
        return self._times[part]

    def error(self, part: Part) -> tuple[float, float] | None:
        """MERE and SQNR (dB) at the nearest measured part of a GEMM's kernel and recipe; None where there is none."""
        nearest = self._exact.get(part)
        if nearest is None or nearest.wrong:
            known = self._known.get(PartSeries.of(part))
            table = known.right_table(part) if known is not None else None
            nearest = table.nearest(axes_of(part))[1] if table is not None else None
        if nearest is None or nearest.mere is None or nearest.sqnr_db is None:
            return None
        return nearest.mere, nearest.sqnr_db

    def wrong_reason(self, part: Part) -> str:
        """Why a kernel's results were wrong at a part or at the nearest measured part; "" where they were right."""
        exact = self._exact.get(part)
        if exact is not None:
            return exact.wrong
        known = self._known.get(PartSeries.of(part))
        if known is None:
            return ""
        right, wrong = (known.table(each, known.alignment(part)) for each in (True, False))
        if wrong is None:
            return ""
        axes = axes_of(part)
        distance, nearest = wrong.nearest(axes)
        if right is not None and right.nearest(axes)[0] < distance:
            return ""
        return f"{nearest.wrong} (at {size_words(nearest.part)}, the nearest measured)"

    def stale(self, here: Versions, libraries: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """A line for each difference between the measured machine and this one.

        `libraries`: installed versions of kernels' own libraries, by kernel name, to be compared as well.
        """
        lines = list(self.machine.differences(here))
        for kernel, found in sorted((libraries or {}).items()):
            measured = self.libraries.get(kernel, found)
            if measured != found:
                lines.append(difference(kernel, measured, found))
        return tuple(lines)

    def _time(self, part: Part) -> PartTime | None:
        exact = self._exact.get(part)
        if exact is not None:
            return None if exact.wrong else PartTime(exact.us, hypot(exact.spread, DRIFT), TimeSource.MEASURED)
        known = self._known.get(PartSeries.of(part))
        table = known.right_table(part) if known is not None else None
        if known is None:
            return self._by_form(part) if part.work in INTERACTIONS else None
        if table is None or (known.wrong and self.wrong_reason(part)):
            return None
        between = known.between(part, is_aligned(part))
        us, spread = between or known.beyond(part)
        source = TimeSource.INTERPOLATED if between is not None else TimeSource.EXTRAPOLATED
        return PartTime(us, hypot(spread, HELD_OUT), source)

    def _by_form(self, part: Part) -> PartTime | None:
        """An interaction's time from that of the nearest form: most words in common, then nearest in bytes."""
        near = []
        for kind in self._known:
            if (kind.work, kind.kernel, kind.dtype) == (part.work, part.kernel, part.dtype):
                other = replace(part, around=kind.around)
                scale = bound_us(part, self.device) / bound_us(other, self.device)
                near.append((unlike(part, other), abs(log(scale)), kind.around, scale))
        for _, _, around, scale in sorted(near):
            timed = self.time(replace(part, around=around))
            if timed is not None:
                source = less_sure(timed.source, TimeSource.ESTIMATED)
                return PartTime(scale * timed.us, hypot(timed.spread, HELD_OUT), source)
        return None
