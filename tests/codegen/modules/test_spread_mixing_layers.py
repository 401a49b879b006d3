"""Mixing layers whose products, weighted sums and joins stand in several modules, in one kernel each, by policy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import Make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

N, DIM, RANK, SUMS = 16, 24, 4, 8
MIXED = f"a mixing layer of {N} embeddings of {DIM}, rank {RANK}"
BOTH = f"{MIXED}, {SUMS} weighted sums"


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Parameter(torch.randn(SUMS, N) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.compress @ x


class LinearSums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Linear(N, SUMS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.compress(x.transpose(1, 2))
        return made.transpose(1, 2)


class Rank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(N, RANK) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.mT, self.rank.unsqueeze(0).expand(len(x), -1, -1))


class Pair(nn.Module):
    def forward(self, x: Tensor, inner: Tensor) -> Tensor:
        return x @ inner


class Body(nn.Module):
    """The parts of a layer, each a module, without its norm."""

    def __init__(self, sums: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix, self.pair, self.sums = Rank(), Pair(), sums()
        self.tower = nn.Linear(N * RANK, (N - SUMS) * DIM)

    def forward(self, x: Tensor) -> Tensor:
        made = self.tower(self.pair(x, self.mix(x)).flatten(1))
        return torch.cat([made.view(-1, N - SUMS, DIM), self.sums(x)], 1) + x


class Model(nn.Module):
    def __init__(self, sums: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(Body(sums), nn.LayerNorm(DIM))
        self.head = nn.Linear(N * DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(1))
        return logits


def of_parameters() -> nn.Module:
    return Model(Sums)


def of_linears() -> nn.Module:
    return Model(LinearSums)


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, N, DIM),)


@pytest.fixture
def make(package: Make) -> Make:
    """The plan of a model under these defaults, the files of its package, and the package."""
    return lambda name, model, defaults, fields="", rules="": package(
        name,
        f'version: 1\nname: spread\nmodel: {{factory: "{__name__}:{model}", '
        f'inputs: "{__name__}:inputs", batch_size: 32}}\n'
        f"defaults: {{{defaults}}}\nmods: [{{use: fuse_interaction{fields}}}]\nrules: [{rules}]\n",
    )


@pytest.mark.parametrize("model", ["of_parameters", "of_linears"])
def test_one_kernel_mixes_and_one_joins(make: Make, model: str) -> None:
    plan, files, package = make(f"gen_spread_{model}", model, "compute: keep")
    assert [each.what for each in plan.interactions] == [BOTH, f"a layer_norm of 2 parts and a residual, {DIM} wide"]
    assert "_passed" in files["modules.py"]
    torch.manual_seed(0)
    native = globals()[model]()
    patched = copy.deepcopy(native)
    (x,) = inputs(7)
    with package.apply(patched):
        for mine, other in zip(steps(native, x), steps(patched, x), strict=True):
            assert (mine - other).norm() <= 1e-4 * mine.norm() + 1e-7
    assert torch.equal(patched(x), native(x))


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the Parameters."""
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def test_without_the_sums_the_kernel_has_the_products_alone(make: Make) -> None:
    for name, fields, rules in (
        ("fp8", "", "{match: '*.rank', compute: keep}"),
        ("left", ", except: '*.sums'", "{match: ['*.rank', '*.compress'], compute: keep}"),
    ):
        plan, _, package = make(f"gen_spread_{name}", "of_parameters", "compute: fp8, scaling: rowwise", fields, rules)
        assert [each.what for each in plan.interactions if "mixing" in each.what] == [MIXED]
        reasons = [left.reason for mod in plan.mods for left in mod.unchanged]
        assert any("weighted sums multiply by 'body.0.sums.compress' in FP8" in each for each in reasons) is (
            name == "fp8"
        )
        native = of_parameters()
        patched = copy.deepcopy(native)
        (x,) = inputs(7)
        with package.apply(patched):
            assert (patched(x) - native(x)).norm() <= 0.15 * native(x).norm()


def test_nothing_is_mixed_where_the_module_of_the_rank_is_excepted(make: Make) -> None:
    plan, _, _ = make("gen_spread_no_rank", "of_parameters", "compute: keep", ", except: '*.mix'")
    assert not [each.what for each in plan.interactions if "mixing" in each.what]


def test_a_part_that_cannot_be_traced_leaves_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Sums, x: Tensor) -> Tensor:
        return self.compress @ x * (2.0 if x.sum() > 1e9 else 1.0)

    monkeypatch.setattr(Sums, "forward", forward)
    plan, _, package = make("gen_spread_branch", "of_parameters", "compute: keep")
    assert not any("weighted" in each.what for each in plan.interactions)
    native = of_parameters()
    patched = copy.deepcopy(native)
    (x,) = inputs(7)
    with package.apply(patched):
        assert (patched(x) - native(x)).norm() <= 1e-4 * native(x).norm()
