"""What the mods that rewrite forwards gain: `python -m loka.bench.exact_mods [CASE ...]`, on a GPU.

Each case is a few linears as a recommender has them, in BF16 and in FP8, each with the mod and without: one training
step (forward, and the gradients of the inputs and of all parameters), compiled, from CUDA graphs, as `loka bench`
measures. Without a mod, BF16 is the model as it is under torch.compile; all others are generated packages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from loka.bench.machine import environment, require_gpu
from loka.bench.packages import Subject, Workshop
from loka.bench.results import NOTHING, Table, markdown_table
from loka.bench.steps import SEED, Measured, make_work, measure
from loka.bench.timing import MEASURED_MS
from loka.bench.variants import Precision, Variant
from loka.errors import InputError, LokaError
from loka.plan.make import make_plan

BF16, FP8 = "compute: keep", "compute: fp8, scaling: rowwise, power_of_two: true, turned: true, fuse: always"
POLICY = """\
version: 1
name: {name}
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
defaults: {{{defaults}}}
mods: [{mods}]
"""


class Experts(nn.Module):
    """Linears with an activation over one input, added up."""

    def __init__(self, experts: int, k: int, n: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(k, n) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        outs = [torch.relu(expert(x)) for expert in self.experts]
        total = outs[0]
        for out in outs[1:]:
            total = total + out
        return total


class Projections(nn.Module):
    """A linear for each feature, side by side."""

    def __init__(self, features: int, k: int, n: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(k, n) for _ in range(features)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([each(x[:, i]) for i, each in enumerate(self.projections)], 1)


class Joined(nn.Module):
    """A linear over two tensors side by side, as over a DLRM's interaction: K need be no multiple of anything."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.linear(torch.cat([x, y], 1)))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the mod that is for it, and the batch at which it is measured."""

    name: str
    mod: str
    kind: str  # one of KINDS
    sizes: tuple[int, ...]  # of its constructor
    batch: int

    @property
    def fp8(self) -> bool:
        """Whether the mod leaves GEMMs that may run in FP8."""
        return self.mod != "batch_small"


KINDS: dict[str, type[nn.Module]] = {"experts": Experts, "projections": Projections, "joined": Joined}
CASES = (
    Case("experts_8x512x1024", "merge_siblings", "experts", (8, 512, 1024), 8192),
    Case("experts_4x256x256", "merge_siblings", "experts", (4, 256, 256), 8192),
    Case("projections_26x128x128", "batch_small", "projections", (26, 128, 128), 8192),
    Case("joined_479x1024", "pad_alignment", "joined", (479, 1024), 16384),
    Case("joined_13x512", "pad_alignment", "joined", (13, 512), 16384),
    Case("joined_3384x1024", "pad_alignment", "joined", (3384, 1024), 16384),
)


def build(case: Case) -> nn.Module:
    """The model of a case."""
    return KINDS[case.kind](*case.sizes)


def inputs(case: Case, batch: int) -> tuple[Tensor, ...]:
    """Standard normal inputs that need a gradient."""
    shapes: tuple[tuple[int, ...], ...]
    match case.kind:
        case "experts":
            shapes = ((batch, case.sizes[1]),)
        case "projections":
            shapes = ((batch, case.sizes[0], case.sizes[1]),)
        case _:
            shapes = ((batch, case.sizes[0] // 2), (batch, case.sizes[0] - case.sizes[0] // 2))
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)


def subject(case: Case) -> Subject:
    """A case as a model to generate for."""
    source = f'''\
"""{case.name}, for the planner."""

from loka.bench import exact_mods

CASE = exact_mods.named([{case.name!r}])[0]


def build():
    return exact_mods.build(CASE)


def inputs(batch_size):
    return exact_mods.inputs(CASE, batch_size)
'''
    return Subject(case.name, source, case.batch)


def named(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of these names, all where none is given. Raises InputError for one that is not known."""
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"there is no case {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or CASES


def package(workshop: Workshop, case: Case, defaults: str, modded: bool) -> ModuleType:
    """The generated package of a case under a policy with or without its mod."""
    factory, example = workshop.add(subject(case))
    name = f"exact_{case.name}_{'fp8' if defaults == FP8 else 'bf16'}{'_mod' if modded else ''}"
    mods = f"{{use: {case.mod}}}" if modded else ""
    text = POLICY.format(name=name, factory=factory, inputs=example, batch=case.batch, defaults=defaults, mods=mods)
    return workshop.package(make_plan(workshop.write(f"{name}.yaml", text)))


def run(cases: Sequence[Case], milliseconds: int = MEASURED_MS) -> Table:
    """Measure the cases on the current GPU: microseconds of a training step."""
    rows: list[tuple[str, ...]] = []
    with Workshop() as workshop:
        for case in cases:
            cells = [_time(workshop, case, *way, milliseconds) for way in _ways(case)]
            bare, modded, *fp8 = [cell if isinstance(cell, str) else cell.timing.median_us for cell in cells]
            rows.append((case.name, case.mod, *_pair(bare, modded), *(_pair(*fp8) if fp8 else (NOTHING,) * 3)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ("case", "mod", "BF16, us", "with the mod", "ratio", "FP8, us", "with the mod", "ratio")
    return head, rows


def _ways(case: Case) -> list[tuple[str, bool]]:
    return [(BF16, False), (BF16, True), *([(FP8, False), (FP8, True)] if case.fp8 else [])]


def _time(workshop: Workshop, case: Case, defaults: str, modded: bool, milliseconds: int) -> Measured | str:
    """One variant of a case, or why it could not be measured."""
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        base, given = build(case), inputs(case, case.batch)
    work = make_work(case.name, base, tuple(each.detach() for each in given), (True,), milliseconds)
    fp8 = defaults == FP8
    variant = Variant("fp8" if fp8 else "bf16", Precision.FP8 if fp8 else Precision.BF16)
    try:
        made = package(workshop, case, defaults, modded) if modded or fp8 else None
        return measure(work, variant, True, made)
    except (LokaError, RuntimeError) as error:  # a kernel that does not run; the others are measured all the same
        return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _pair(bare: float | str, modded: float | str) -> tuple[str, str, str]:
    if isinstance(bare, str) or isinstance(modded, str):
        return _shown(bare), _shown(modded), NOTHING
    return _shown(bare), _shown(modded), f"{bare / modded:.2f}"


def _shown(cell: float | str) -> str:
    return cell if isinstance(cell, str) else f"{cell:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loka.bench.exact_mods", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(case.name for case in CASES)}; default: all")
    options = parser.parse_args(arguments)
    try:
        cases = named(options.cases)
        require_gpu()
        print(f"{environment()}\n\n{markdown_table(run(cases))}")
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
