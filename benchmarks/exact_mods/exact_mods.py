"""Speedup of the mods that rewrite forwards: `python -m benchmarks.exact_mods [CASE ...]`, on a GPU.

Each case is a small model in BF16 and in FP8, with and without the mod: one training step (forward, and the gradients
of the inputs and of all parameters), compiled, from CUDA graphs, measured as in `loka bench`. BF16 without a mod is
the unchanged model under torch.compile; all others are generated packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from benchmarks.exact_mods.exact_cases import ModCase, build, inputs, subject
from benchmarks.packages import StudyWorkshop
from benchmarks.replays import MEASURED_MS
from benchmarks.roofline import GemmMath
from benchmarks.steps import make_work, measure
from benchmarks.study import tell
from benchmarks.variants import Variant
from loka.bench.device import describe
from loka.bench.markdown import Table
from loka.bench.results import NOTHING
from loka.bench.timing import SEED
from loka.errors import LokaError
from loka.plan.planner import make_plan

BF16, FP8 = (
    "compute: keep",
    "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always",
)
POLICY = """\
version: 1
name: {name}
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
defaults: {{{defaults}}}
mods: [{mods}]
"""


def package(workshop: StudyWorkshop, case: ModCase, defaults: str, modded: bool) -> ModuleType:
    """Generate and import the package of a case, with or without its mod."""
    factory, example = workshop.add(subject(case))
    name = f"exact_{case.name}_{'fp8' if defaults == FP8 else 'bf16'}{'_mod' if modded else ''}"
    mods = f"{{use: {case.mod}}}" if modded else ""
    text = POLICY.format(name=name, factory=factory, inputs=example, batch=case.batch, defaults=defaults, mods=mods)
    return workshop.package(make_plan(workshop.write(f"{name}.yaml", text)))


def run(cases: Sequence[ModCase], milliseconds: int = MEASURED_MS) -> Table:
    """Measure the cases on the current GPU: microseconds of a training step."""
    rows: list[tuple[str, ...]] = []
    with StudyWorkshop() as workshop:
        for case in cases:
            columns: list[str] = []
            for defaults, taken in ((BF16, case.bf16), (FP8, case.fp8)):
                columns += _pair(workshop, case, defaults, milliseconds) if taken else (NOTHING,) * 3
            rows.append((case.name, case.mod, *columns))
            tell(" | ".join(rows[-1]))
    head = ("case", "mod", "BF16, us", "with the mod", "ratio", "FP8, us", "with the mod", "ratio")
    return head, rows


def _pair(workshop: StudyWorkshop, case: ModCase, defaults: str, milliseconds: int) -> tuple[str, str, str]:
    """Times of a case without and with its mod, and their ratio, as text."""
    bare, modded = (_time(workshop, case, defaults, modded, milliseconds) for modded in (False, True))
    if isinstance(bare, str) or isinstance(modded, str):
        return _shown(bare), _shown(modded), NOTHING
    return _shown(bare), _shown(modded), f"{bare / modded:.2f}"


def _time(workshop: StudyWorkshop, case: ModCase, defaults: str, modded: bool, milliseconds: int) -> float | str:
    """Microseconds of one variant of a case, or the reason why it failed."""
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        base, given = build(case), inputs(case, case.batch)
    work = make_work(case.name, base, tuple(each.detach() for each in given), (True,), milliseconds)
    fp8 = defaults == FP8
    variant = Variant("fp8" if fp8 else "bf16", GemmMath.FP8 if fp8 else GemmMath.BF16)
    try:
        made = package(workshop, case, defaults, modded) if modded or fp8 else None
        return measure(work, variant, True, made).timing.median_us
    except (LokaError, RuntimeError) as error:  # for example a kernel fails; the others are still measured
        return f"failed: {describe(error)}"


def _shown(cell: float | str) -> str:
    return cell if isinstance(cell, str) else f"{cell:.1f}"
