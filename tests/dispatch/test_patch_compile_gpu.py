"""`Patch.compile` on a Hopper GPU: the bits of eager steps from layers that share what is compiled, or its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import policy_packages
from tests.support.gpu import ON_HOPPER
from tests.support.models.block_tower import POLICY, WIDTH, block_tower

pytestmark = ON_HOPPER

MODES: list[dict[str, Any]] = [{}, {"mode": "reduce-overhead"}]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[nn.Module, nn.Module, Any]]:
    """The same tower twice, bound to two packages of one policy, and the patch of the second."""
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.manual_seed(0)
    usual, other = block_tower().cuda().bfloat16(), block_tower().cuda().bfloat16()
    other.load_state_dict(usual.state_dict())
    with policy_packages(tmp_path) as make:
        first, second = (make(name, POLICY)[2] for name in ("gen_usual", "gen_compiled"))
        with first.apply(usual), second.apply(other) as patch:
            yield usual, other, patch
    torch.compiler.reset()


def rows(batch: int, seed: int) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()


def gradients(model: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Outputs of the batches, and the gradients of all parameters, which their backwards accumulate."""
    model.zero_grad()
    torch.compiler.cudagraph_mark_step_begin()
    outputs = []
    for x in batches:
        y = model(x)
        y.square().mean().backward()
        outputs.append(y.detach().clone())
    return outputs + [parameter.grad.clone() for parameter in model.parameters()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", MODES, ids=["default", "reduce-overhead"])
def test_steps_have_the_bits_of_eager_steps(models, options) -> None:
    """Batch after batch, then one of another size, and a sum over two."""
    usual, other, patch = models
    patch.compile(**options)
    patch.reset()
    for seed in range(5):
        assert same(gradients(other, rows(256, seed)), gradients(usual, rows(256, seed))), seed
    patch.verify()
    assert same(gradients(other, rows(83, 5)), gradients(usual, rows(83, 5)))
    for seed in range(6, 9):
        batches = rows(256, seed), rows(256, seed + 10)
        assert same(gradients(other, *batches), gradients(usual, *batches)), seed


@pytest.mark.parametrize("options", MODES, ids=["default", "reduce-overhead"])
def test_so_has_inference(models, options) -> None:
    usual, other, patch = models
    patch.compile(**options)
    with torch.no_grad():
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(other(rows(256, seed)).clone(), usual(rows(256, seed))), seed
