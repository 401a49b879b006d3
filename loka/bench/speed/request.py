"""`loka bench region` and `kernels` without the command line: check a request, measure it, return a report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loka.bench.machine import environment, require_gpu
from loka.bench.results import Report, Section, usable_folder
from loka.bench.speed import kernel_speed, library_gemms, region_speed
from loka.bench.speed.comparison import Progress
from loka.bench.speed.region_speed import DEFAULT_SHAPES, Form
from loka.bench.subjects.variants import choose, variants_named
from loka.errors import InputError

HERE = ("kernels", "region")
WHAT = (*HERE, "model")  # `loka.bench.model` and `loka.bench.ablation` have that
STUDIES = ("crossover", "regret", "dispatch")  # studies of LoKA itself, in the repository but not in the package
ONLY = ("train", "infer")
FORMS = tuple(form.value for form in Form)
BELONGS: Mapping[str, tuple[str, ...]] = {  # option -> options or kinds of benchmark of which one is required with it
    "--parts": ("--record",),
    "--policy": ("--record",),
    "--seconds": ("--record", "model"),
    "--jobs": ("--record", "--ablate"),
    "--target": ("--export",),
    "--casting": ("model",),
    "--modes": ("--ablate",),
    "--batch": ("model",),
    "--rounds": ("model",),
    "--loss-steps": ("--ablate",),
}
EXCLUDES: Mapping[str, tuple[str, ...]] = {  # option -> options that it cannot be combined with
    "--form": ("--record", "--export", "--ablate"),
    "--variants": ("--record", "--export", "--ablate"),
    "--casting": ("--ablate",),
    "--rounds": ("--ablate",),
    "--only": ("--record", "--export"),
    "--record": ("--ablate",),
    "--export": ("--ablate",),
}

METHOD = (
    "Microseconds: the median, 10th and 90th percentile of CUDA-graph replays. Ratios are the baseline's time over the "
    "variant's. `reached` is the bound over the time; what the bound counts stands in docs/bench.md."
)
STEPS = (
    "All variants run under torch.compile (ours with fullgraph) and from CUDA graphs; weights are quantized inside a "
    "training step and frozen for inference. dB: signal to error against float32. Peak memory: of one training step, "
    "what the variant itself holds."
)
KERNELS = (
    "Inputs rotate: between two launches on one of them more than the L2 cache holds is read. dB: signal to error, of "
    "a rendered kernel's first result against its reference, of a GEMM against float64 on what was quantized."
)


@dataclass(frozen=True, slots=True)
class Request:
    """The command-line options of a benchmark, unchecked."""

    what: str
    names: tuple[str, ...] = ()  # shapes or families
    form: str | None = None
    only: str | None = None
    variants: str | None = None

    def command(self) -> str:
        """The command line that repeats the request."""
        parts = ["loka", "bench", self.what, *self.names]
        for option, value in (("--form", self.form), ("--only", self.only), ("--variants", self.variants)):
            parts += [option, value] if value is not None else []
        return shlex.join(parts)


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A checked request, with the function that measures it."""

    request: Request
    variants: tuple[str, ...]
    run: Callable[[Progress], tuple[Section, ...]]


def check_options(what: str, given: Collection[str]) -> None:
    """Reject options that would be ignored, and studies, which are not part of the command line.

    `given`: the options on the command line, such as "--jobs". Raises InputError.
    """
    if what in STUDIES:
        raise InputError(
            f"loka bench {what}: a study of LoKA itself, which is no part of the command line; in LoKA's repository "
            f"run `python -m benchmarks.{what}`, with the same arguments"
        )
    for option, others in BELONGS.items():
        if option in given and not set(others) & {*given, what}:
            named = [each if each.startswith("--") else f"loka bench {each}" for each in others]
            raise InputError(f"loka bench: {option} goes with {' or '.join(named)}; add one, or leave {option} out")
    for option, others in EXCLUDES.items():
        beside = [other for other in others if other in given]
        if option in given and beside:
            raise InputError(f"loka bench: {option} says nothing to {beside[0]}; leave one of the two out")


def check(request: Request) -> BenchJob:
    """Check everything that can be checked before measuring. Raises InputError."""
    if request.what not in HERE:
        raise InputError(f"loka bench: there is no {request.what!r} to measure; write one of {', '.join(WHAT)}")
    if request.form is not None and request.what != "region":
        raise InputError(f"loka bench {request.what}: --form is for `loka bench region`; leave it out")
    if request.only is not None and request.what == "kernels":
        raise InputError("loka bench kernels: a kernel is in no mode; leave --only out")
    if request.only not in (None, *ONLY):
        raise InputError(f"--only: there is no {request.only!r}; write train or infer")
    modes = tuple(mode == "train" for mode in ([request.only] if request.only else ONLY))
    if request.what == "kernels":
        chosen = choose(request.variants, library_gemms.NAMES)
        families = kernel_speed.families(request.names)
        if request.variants is not None and kernel_speed.GEMM not in families:
            raise InputError("loka bench kernels: --variants are those of the family gemm, which is not measured")
        return BenchJob(request, chosen, lambda progress: kernel_speed.run_kernels(families, chosen, progress))
    chosen = choose(request.variants)
    variants = variants_named(chosen)
    form = _form(request.form)
    shapes = tuple(map(region_speed.parse_shape, request.names)) or DEFAULT_SHAPES
    for shape in shapes:
        region_speed.check_shape(form, shape)
    return BenchJob(request, chosen, lambda progress: region_speed.run_regions(form, shapes, variants, modes, progress))


def run(request: Request, out: Path, progress: Progress, now: datetime | None = None) -> Report:
    """Check a request and measure it; the folder `out` is created, but the report is not written.

    Raises InputError for an invalid request, without a GPU, and if `out` is not writable.
    """
    job = check(request)
    require_gpu()
    usable_folder(out)
    sections = job.run(progress)
    date = (now or datetime.now(UTC)).astimezone(UTC)
    notes = (METHOD, KERNELS if request.what == "kernels" else STEPS)
    return Report(request.what, request.command(), f"{date:%Y-%m-%dT%H:%M}Z", environment(), sections, notes)


def _form(text: str | None) -> Form:
    if text is None:
        return Form.LAYER_NORM
    if text not in FORMS:
        raise InputError(f"--form: there is no {text!r}; write one of {', '.join(FORMS)}")
    return Form(text)
