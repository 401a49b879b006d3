"""Small models with typical linears of recommenders, for the mods that rewrite forwards (`exact_mods`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.packages import Subject
from loka.errors import InputError


class Experts(nn.Module):
    """The sum of several linears with activations over one input."""

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
    """A linear over a concatenation, as after a DLRM's interaction: K need not be a multiple of anything."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.linear(torch.cat([x, y], 1)))


@dataclass(frozen=True, slots=True)
class ModCase:
    """A model, its mod, and its batch size."""

    name: str
    mod: str
    kind: str  # one of KINDS
    sizes: tuple[int, ...]  # of its constructor
    batch: int

    @property
    def bf16(self) -> bool:
        """True if the mod changes linears in BF16, where rows of a multiple of 8 elements are already aligned."""
        return self.mod != "pad_alignment" or self.sizes[0] % 8 != 0

    @property
    def fp8(self) -> bool:
        """True if the model with the mod has GEMMs that may run in FP8."""
        return self.mod != "batch_small"


KINDS: dict[str, type[nn.Module]] = {"experts": Experts, "projections": Projections, "joined": Joined}
CASES = (
    ModCase("experts_8x512x1024", "merge_siblings", "experts", (8, 512, 1024), 8192),
    ModCase("experts_4x256x256", "merge_siblings", "experts", (4, 256, 256), 8192),
    ModCase("projections_26x128x128", "batch_small", "projections", (26, 128, 128), 8192),
    ModCase("joined_479x1024", "pad_alignment", "joined", (479, 1024), 16384),
    ModCase("joined_13x512", "pad_alignment", "joined", (13, 512), 16384),
    ModCase("joined_3384x1024", "pad_alignment", "joined", (3384, 1024), 16384),
)


def build(case: ModCase) -> nn.Module:
    """The model of a case."""
    return KINDS[case.kind](*case.sizes)


def inputs(case: ModCase, batch: int) -> tuple[Tensor, ...]:
    """Standard normal inputs that require gradients."""
    shapes: tuple[tuple[int, ...], ...]
    match case.kind:
        case "experts":
            shapes = ((batch, case.sizes[1]),)
        case "projections":
            shapes = ((batch, case.sizes[0], case.sizes[1]),)
        case _:
            shapes = ((batch, case.sizes[0] // 2), (batch, case.sizes[0] - case.sizes[0] // 2))
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)


def subject(case: ModCase) -> Subject:
    """A case as a Subject to generate a package for."""
    source = f'''\
"""{case.name}, for the planner."""

from benchmarks.exact_mods import exact_cases

CASE = exact_cases.named([{case.name!r}])[0]


def build():
    return exact_cases.build(CASE)


def inputs(batch_size):
    return exact_cases.inputs(CASE, batch_size)
'''
    return Subject(case.name, source, case.batch)


def named(names: Sequence[str]) -> tuple[ModCase, ...]:
    """The cases of these names (none: all). Raises InputError for an unknown one."""
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"there is no case {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or CASES
