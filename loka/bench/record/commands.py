"""What `loka bench` does with recorded parts: recording them, exporting, the crossover map, regret, and Dispatch."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.crossover import crossover
from benchmarks.crossover.crossover_plot import plot
from benchmarks.dispatch.dispatch_cases import HOWS, SHAPES
from benchmarks.dispatch.dispatch_run import run_dispatch
from benchmarks.dispatch.dispatch_table import USUAL, VARIANTS, to_markdown
from benchmarks.regret import regret
from benchmarks.regret.regret_sites import site_problems
from loka.bench.machine import require_gpu
from loka.bench.record.run_record import libraries, parts_of, run_record
from loka.bench.record.store import FileBook
from loka.bench.results import usable_folder, write_text
from loka.bench.speed.comparison import Progress
from loka.bench.speed.region_speed import parse_shape
from loka.bench.speed.request import OF_RECORDS
from loka.bench.subjects.variants import choose
from loka.errors import InputError
from loka.kernels.gemm.catalogue import GEMM_KERNELS, HOPPER_TARGETS
from loka.kernels.measurements.lookup import Measurements, Recording, Versions, export

MAP, REGRET, DISPATCH = WHAT = OF_RECORDS
LINES = "dispatch.jsonl"


@dataclass(frozen=True, slots=True)
class Command:
    """What a person asks for, as it was typed."""

    what: str  # kernels, crossover or regret
    names: tuple[str, ...] = ()  # files of measurements; for dispatch one, and regions as M,N,K
    record: Path | None = None  # file that measurements are written into
    parts: str | None = None  # kinds of parts, comma-separated
    policy: Path | None = None  # whose sites' parts are recorded, in place of those that ship
    seconds: float = math.inf  # after which recording stops, to go on another time
    jobs: int = 0  # processes that compile, by the CPUs where 0
    export: Path | None = None  # file that measurements are written into as text
    target: str = "h100"  # whose measurements are exported, mapped or compared
    variants: str | None = None  # of dispatch
    out: Path = Path("docs/results")

    @property
    def of_records(self) -> bool:
        """Whether it is one of those here, and no comparison of `loka.bench.speed.request`."""
        return self.what in WHAT or any(each is not None for each in (self.record, self.export, self.policy))

    def command(self) -> str:
        """As it is typed again, files without their folders."""
        return shlex.join(["loka", "bench", self.what, *(Path(name).name for name in self.names)])


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What came of an order: in words, and as JSON can hold it."""

    text: str
    plain: dict[str, object]


def carry_out(order: Command, progress: Progress) -> CommandOutcome:
    """Do what is asked; gives what is to be printed.

    Raises InputError where the order is not right, a file is missing or wrong, or there is no GPU to record on.
    """
    _check(order)
    if order.what == MAP:
        return draw_map(order)
    if order.what == REGRET:
        return compare(order)
    if order.what == DISPATCH:
        return dispatch(order, progress)
    if order.policy is not None and order.record is None:
        raise InputError("loka bench kernels: --policy says what is recorded; name the file with --record")
    if order.what != "kernels":
        raise InputError(f"loka bench {order.what}: --record and --export are for `loka bench kernels`; leave them out")
    outcomes = []
    if order.record is not None:
        if order.names:
            raise InputError(f"loka bench kernels --record: name kinds of parts with --parts, not {order.names[0]!r}")
        outcomes.append(record(order, order.record, progress))
    if order.export is not None:
        outcomes.append(export_text(order, order.export))
    plain = {key: value for each in outcomes for key, value in each.plain.items()}
    return CommandOutcome("\n".join(each.text for each in outcomes), plain)


def _check(order: Command) -> None:
    """Raises InputError for a target that there is not, and for seconds that are no time."""
    if order.target not in HOPPER_TARGETS:
        known = " or ".join(HOPPER_TARGETS)
        raise InputError(f"loka bench --target: nothing is measured for {order.target!r}; write {known}")
    if math.isnan(order.seconds) or order.seconds <= 0:
        raise InputError(f"loka bench --seconds: {order.seconds:g} is no time to work in; write a number above 0")


def record(order: Command, file: Path, progress: Progress) -> CommandOutcome:
    """Measure what the file has not got."""
    works = tuple(filter(None, (order.parts or "").split(",")))
    known = libraries()
    parts = parts_of(works, order.policy)
    require_gpu()
    with Recording(file, lambda kernel: Versions.here(known.get(kernel, ""))) as recording:
        tally = run_record(FileBook(recording), parts, progress, order.seconds, order.jobs)
        if tally.measured + tally.known + tally.failed < len(set(parts)):
            recording.stopped_early()
    return CommandOutcome(f"{file}: {tally}", {"recorded": str(file), **asdict(tally)})


def export_text(order: Command, text: Path) -> CommandOutcome:
    """Write a file's measurements as text, of the file just recorded or the one that is named."""
    if order.record is None and len(order.names) != 1:
        raise InputError("loka bench kernels --export: name the one file of measurements that is to be exported")
    source = order.record if order.record is not None else Path(order.names[0])
    measured = export(source, text, order.target, f"loka bench kernels --record {source.name}")
    count = len(measured.measurements)
    return CommandOutcome(
        f"wrote {text}: {count} measurements on {measured.machine}", {"exported": str(text), "measurements": count}
    )


def draw_map(order: Command) -> CommandOutcome:
    """Write the crossover map's page and plot."""
    if len(order.names) != 1:
        raise InputError("loka bench crossover: name one file of measurements")
    known = Measurements.open(order.names[0], order.target)
    found = crossover.crossover(known)
    if not any(found.values()):
        raise InputError(
            f"{order.names[0]}: no GEMM was measured in FP8 and in BF16; record them with --parts gemm,quantise,turn"
        )
    usable_folder(order.out)
    page, picture = (order.out / f"crossover-{known.date[:10]}.{suffix}" for suffix in ("md", "svg"))
    source = f"From {known.name}, measured until {known.date}, by `{order.command()}`"
    write_text(page, crossover.to_markdown(found, str(known.machine), source))
    lines = [f"{crossover.TITLES[view]}: {crossover.summary(ratios)}" for view, ratios in found.items()]
    plot(found, known.machine.device, picture)
    plain: dict[str, object] = {
        view.value: [{"m": m, "k": k, "n": n, **asdict(ratio)} for (m, k, n), ratio in ratios.items()]
        for view, ratios in found.items()
    }
    return CommandOutcome("\n".join([*lines, f"wrote {page} and {picture}"]), plain)


def compare(order: Command) -> CommandOutcome:
    """Regret between two files."""
    if len(order.names) != 2:
        raise InputError("loka bench regret: name two files of measurements: one to decide by, one to judge by")
    first, second = (Measurements.open(name, order.target) for name in order.names)
    parts = first.parts
    both = {part.kernel for part in parts} & {part.kernel for part in second.parts}
    kernels = [kernel.name for kernel in GEMM_KERNELS if kernel.operator is not None and kernel.name in both]
    problems = {f"GEMMs, {recipe}": found for recipe, found in regret.gemm_problems(parts).items()}
    problems.update({f"sites, {how.value} accumulation": tuple(site_problems(kernels, how)) for how in HOWS})
    summaries = []
    for title, found in problems.items():
        with contextlib.suppress(InputError):  # nothing of the kind was recorded twice
            summaries.append(regret.summarise(title, found, first, second))
    if not summaries:
        raise InputError(f"{order.names[0]} and {order.names[1]} have nothing in common; record the same parts twice")
    shares = regret.drift(parts, first, second)
    return CommandOutcome(regret.to_text(summaries, shares), regret.to_plain(summaries, shares))


def dispatch(order: Command, progress: Progress) -> CommandOutcome:
    """Plan the regions by measurements, measure what is not in the file of lines yet, and write the table."""
    end = time.monotonic() + order.seconds
    if not order.names:
        raise InputError("loka bench dispatch: name a file of measurements, and then regions as M,N,K, or none for all")
    shapes = tuple(map(parse_shape, order.names[1:])) or SHAPES
    variants = choose(order.variants, VARIANTS) if order.variants is not None else USUAL
    known = Measurements.open(order.names[0], order.target)
    require_gpu()
    usable_folder(order.out)
    lines = run_dispatch(order.out / LINES, known, shapes, variants, progress, lambda: time.monotonic() > end)
    source = f"By {known.name}, measured until {known.date}"
    page = to_markdown(lines, str(known.machine), source)
    write_text(order.out / "dispatch.md", page)
    text = f"{page}\nwrote {order.out / LINES} and {order.out / 'dispatch.md'}"
    return CommandOutcome(text, {"lines": [asdict(line) for line in lines]})
