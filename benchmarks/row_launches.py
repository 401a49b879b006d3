"""A sweep of launches of kernels over rows: `python -m benchmarks.row_launches -o FILE`, on a GPU.

For each part and width it renders the part's kernels with every launch that a thread's registers allow, compiles them
in several processes, times them one after another, and tries other numbers of programs for the best. The table sets the
best launch beside the device's own (`loka.devices.hopper`) and beside the time of the part's bytes at a copy's speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.replays import time_step
from benchmarks.study import run_study, tell
from loka.bench.machine import device_here, require_gpu
from loka.bench.record.gemm_parts import PreparedCall
from loka.bench.record.producer_parts import Producers, specs_of
from loka.bench.timing import rotations, size_of
from loka.devices.spec import DeviceSpec, RowLaunch
from loka.errors import LokaError
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.rendering import OPERATORS_FILE, render, render_files
from loka.kernels.measurements.part_bounds import START_US, bound_us
from loka.kernels.measurements.parts import RENDERED, Part, PartKind
from loka.paths import write_file
from loka.templating.templates import load_templates

# The table of `RowLaunches` that a part's kernels are launched by, its kind, what it writes and what is around it.
PARTS = (
    ("forward", PartKind.FORWARD, "e4m3 rowwise", "layer_norm"),
    ("forward", PartKind.FORWARD, "e4m3 rowwise", "layer_norm silu"),
    ("forward", PartKind.FORWARD, "bfloat16", "layer_norm sigmoid"),
    ("forward_simple", PartKind.QUANTIZE, "e4m3 rowwise", ""),
    ("forward_simple", PartKind.QUANTIZE, "e4m3 tensorwise", ""),
    ("backward", PartKind.BACKWARD, "bfloat16", "layer_norm"),
    ("backward_quantized", PartKind.BACKWARD, "e4m3 rowwise", "layer_norm"),
    ("backward_quantized", PartKind.BACKWARD, "e4m3 rowwise", "layer_norm sigmoid"),
)
WIDTHS = (512, 1024, 2048, 4096)
SWEPT_ROWS, ROWS = (8192, 32768), (2048, 8192, 32768)  # of the sweep; of its best launches and the device's own
LAUNCHES = 8  # in a graph
MEASURED_MS = 10  # of replays, after the timer's own warm-up
MOST_ELEMENTS = 32  # of a row that a thread holds
FINALISTS = 3
OWN = "own"


@dataclass(frozen=True, slots=True)
class Case:
    """A part (its rows are replaced by those that are timed) and the table of launches that it belongs to."""

    table: str
    part: Part

    @property
    def name(self) -> str:
        """The case in words: "backward layer_norm -> e4m3 rowwise, 512 wide"."""
        around = f" {self.part.around}" if self.part.around else ""
        return f"{self.part.work}{around} -> {self.part.recipe}, {self.part.columns} wide"


@dataclass(frozen=True, slots=True)
class LaunchCandidate:
    """A case under a launch: None stands for the device's own."""

    case: Case
    launch: RowLaunch | None


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a candidate for each number of rows."""

    candidate: LaunchCandidate
    us: Mapping[int, float]

    def over(self, other: Timed) -> float:
        """How many times as fast as another it is: the geometric mean over the rows that both have."""
        rows = self.us.keys() & other.us.keys()
        return math.exp(sum(math.log(other.us[m] / self.us[m]) for m in rows) / len(rows))


def cases(widths: Sequence[int]) -> tuple[Case, ...]:
    """All cases at these widths."""
    return tuple(
        Case(table, Part(kind, RENDERED, SWEPT_ROWS[0], width, recipe=recipe, around=around))
        for width in widths
        for table, kind, recipe, around in PARTS
    )


def launches(case: Case) -> Iterator[RowLaunch]:
    """Launches to try: a thread holds 8 to 32 elements of a step, a backward with sums from 4."""
    width, backward = case.part.columns, case.part.work is PartKind.BACKWARD
    for rows, warps, stages in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 3)):
        elements = rows * width // (32 * warps)
        if (4 if backward else 8) <= elements <= MOST_ELEMENTS:
            programs = max((16 if backward else 32) // warps, 1)
            yield RowLaunch(rows=rows, warps=warps, programs=programs, stages=stages)


def other_programs(launch: RowLaunch) -> Iterator[RowLaunch]:
    """The same with half and twice as many programs."""
    for programs in (launch.programs // 2, launch.programs * 2):
        if 1 <= programs <= 64 // launch.warps:
            yield replace(launch, programs=programs)


def own_launch(case: Case, device: DeviceSpec) -> RowLaunch:
    """The device's launch of the case's last kernel over rows."""
    return configuration(
        [spec for spec in specs_of(case.part) if isinstance(spec, NormForward | NormBackward)][-1], device
    )


def write_kernels(folder: Path, name: str, candidate: LaunchCandidate, device: DeviceSpec) -> None:
    """Render a candidate's kernels as the package `name` in the folder."""
    templates = load_templates()
    kernels = [render(spec, _launch_of(spec, candidate), device) for spec in specs_of(candidate.case.part)]
    package = folder / name
    package.mkdir()
    for file, text in {**render_files(kernels, templates, "a sweep of launches"), "__init__.py": ""}.items():
        (package / file).write_text(text, encoding="utf-8")


def _launch_of(spec: Spec, candidate: LaunchCandidate) -> RowLaunch | None:
    return candidate.launch if isinstance(spec, NormForward | NormBackward) else None


def _module(folder: str, name: str) -> ModuleType:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.{OPERATORS_FILE.removesuffix('.py')}")


def _prepared(folder: str, name: str, part: Part) -> PreparedCall:
    return Producers(_module(folder, name)).prepare(part)


def compile_all(folder: str, named: Sequence[tuple[str, Part]]) -> None:
    """Call each package's kernels once, which fills Triton's cache; what fails will fail again when it is timed."""
    for name, part in named:
        try:
            prepared = _prepared(folder, name, replace(part, rows=256))
            prepared.call(*prepared.arguments)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  (of the compiler or the driver: such a launch is left out)
            tell(f"{name}: {type(error).__name__}")


def timed(folder: str, name: str, candidate: LaunchCandidate, rows: Sequence[int], checked: bool) -> Timed:
    """Time a candidate; raises LokaError for wrong numbers where they are `checked`."""
    found: dict[int, float] = {}
    for m in rows:
        prepared = _prepared(folder, name, replace(candidate.case.part, rows=m))
        if checked and (wrong := prepared.check(prepared.call(*prepared.arguments)).wrong):
            raise LokaError(f"{candidate.case.name} under {candidate.launch}: {wrong}")
        count = rotations(size_of(prepared.arguments))
        copies = [tuple(_copied(each) for each in prepared.arguments) for _ in range(min(count, LAUNCHES) - 1)]
        step = partial(_calls, prepared, [prepared.arguments, *copies], [])
        found[m] = time_step(step, MEASURED_MS).median_us / LAUNCHES / prepared.parts
    return Timed(candidate, found)


def _calls(prepared: PreparedCall, sets: Sequence[tuple[object, ...]], kept: list[object]) -> None:
    """Call on one set of arguments after another; results are kept, so that each call writes to its own memory."""
    kept[:] = [prepared.call(*sets[index % len(sets)]) for index in range(LAUNCHES)]


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def sweep(widths: Sequence[int], jobs: int, seconds: float) -> list[Timed]:
    """Compile and time all candidates, as far as the time goes; the device's own launches come first."""
    device, end = device_here(), time.monotonic() + seconds
    chosen = cases(widths)
    own = [LaunchCandidate(case, None) for case in chosen]
    tried = [LaunchCandidate(case, launch) for case in chosen for launch in launches(case)]
    with tempfile.TemporaryDirectory(prefix="loka-rows-") as folder:
        names = {candidate: f"row_launch_{place}" for place, candidate in enumerate([*own, *tried])}
        for candidate, name in names.items():
            write_kernels(Path(folder), name, candidate, device)
        tell(f"compiling {len(names)} kernels in {jobs} processes")
        work = [(name, candidate.case.part) for candidate, name in names.items()]
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            list(pool.map(compile_all, [folder] * jobs, [work[start::jobs] for start in range(jobs)]))
        found = []
        tell("timing")

        def time_one(candidate: LaunchCandidate, rows: Sequence[int]) -> None:
            if time.monotonic() > end:
                return
            try:
                found.append(timed(folder, names[candidate], candidate, rows, checked=rows is ROWS))
            except Exception as error:  # noqa: BLE001  (too many registers or too much shared memory, mostly)
                tell(f"{candidate.case.name}, {candidate.launch}: {type(error).__name__}: {error}"[:200])

        for candidate in own:
            time_one(candidate, ROWS)
        for candidate in tried:
            time_one(candidate, SWEPT_ROWS)
        for case in chosen:
            for best in ranked(found, case)[:FINALISTS]:
                if best.candidate.launch is None:
                    continue
                for launch in other_programs(best.candidate.launch):
                    other = LaunchCandidate(case, launch)
                    names[other] = f"row_launch_{len(names)}"
                    write_kernels(Path(folder), names[other], other, device)
                    time_one(other, SWEPT_ROWS)
            for best in ranked(found, case)[:FINALISTS]:
                if best.candidate.launch is not None:
                    time_one(best.candidate, ROWS)
    return found


def empty_us() -> float:
    """Microseconds of a kernel that has nothing to do, one after another in a graph."""
    x = torch.zeros(1, device="cuda")

    def step() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return time_step(step, MEASURED_MS).median_us / LAUNCHES


def ranked(found: Sequence[Timed], case: Case) -> list[Timed]:
    """A case's results, the fastest over `SWEPT_ROWS` first; of several of one candidate the last."""
    latest = {each.candidate: each for each in found if each.candidate.case == case}
    return sorted(latest.values(), key=lambda each: math.prod(each.us[m] for m in SWEPT_ROWS))


def table(found: Sequence[Timed], device: DeviceSpec) -> str:
    """A line for each case: the device's own launch and the best, with the share of the bound that each reaches."""
    lines = [
        f"Microseconds at {', '.join(map(str, ROWS))} rows; in brackets percent of the bytes' time at a copy's speed.",
        "",
        "| case | own launch | us | best | us | own / best |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(each.candidate.case for each in found):
        order = ranked(found, case)
        own = next((each for each in order if each.candidate.launch is None), None)
        whole = [each for each in order if len(each.us) == len(ROWS) and each.candidate.launch is not None]
        if own is None or not whole:
            continue
        best = whole[0]
        lines.append(
            f"| {case.table}: {case.name} | {_words(own_launch(case, device))} | {_times(own, device)} | "
            f"{_words(best.candidate.launch)} | {_times(best, device)} | {best.over(own):.2f} |"
        )
    return "\n".join(lines)


def _words(launch: RowLaunch | None) -> str:
    if launch is None:
        return "-"
    held = "" if launch.held else ", reread"
    return f"{launch.rows} rows, {launch.warps} warps, {launch.programs} programs, {launch.stages} stages{held}"


def _times(found: Timed, device: DeviceSpec) -> str:
    part = found.candidate.case.part
    shares = {m: 100 * (bound_us(replace(part, rows=m), device) - START_US) / us for m, us in found.us.items()}
    return ", ".join(f"{us:.1f} ({shares[m]:.0f})" for m, us in found.us.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, write the results as JSON and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_launches", description="A sweep of launches.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of JSON with all times")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time no candidate after so many")
    options = parser.parse_args(arguments)

    def study() -> str:
        require_gpu()
        found = sweep(options.widths, options.jobs, options.seconds)
        write_file(options.output, json.dumps([asdict(each) for each in found], indent=1))
        return f"A kernel of one element takes {empty_us():.2f} us.\n\n{table(found, device_here())}"

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
