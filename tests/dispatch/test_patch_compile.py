"""`Patch.compile`: generated functions compiled by themselves, once for all layers, in a model that stays eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from loka import dispatch
from tests.support.codegen.policy_packages import policy_packages
from tests.support.models.block_tower import BLOCKS, POLICY, block_tower, tower_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

FUNCTIONS = 2  # of a block, and of the last norm and linear


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("patch_compile")
    with pytest.MonkeyPatch.context() as patch, policy_packages(folder) as make:
        patch.chdir(folder)
        yield make("gen_patch_compile", POLICY)[2]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_layers_share_what_is_compiled_and_give_the_same_bits(package) -> None:
    """A block is compiled twice: its counter ids become symbolic when the second layer comes."""
    model = block_tower()
    compiled = CompileCounterWithBackend("aot_eager")
    with package.apply(model) as patch:
        expected = step(model, tower_rows(64))
        patch.compile(backend=compiled)
        patch.reset()
        assert same(step(model, tower_rows(64)), expected)
        patch.verify()
        assert compiled.frame_count == FUNCTIONS + 1 < BLOCKS
        graphs = compiled.frame_count
        for rows in (48, 80):
            step(model, tower_rows(rows))
        assert compiled.frame_count <= 2 * graphs  # a second time, for any batch
        settled = compiled.frame_count
        step(model, tower_rows(16))
        assert compiled.frame_count == settled


def test_what_did_not_run_is_missed(package) -> None:
    model = block_tower()
    with package.apply(model) as patch:
        patch.compile(backend="aot_eager")
        model[0](tower_rows(64)).sum().backward()
        with pytest.raises(dispatch.VerifyError, match=r"1\.up"):
            patch.verify()


def test_an_outer_compiler_takes_them_in(package) -> None:
    model = block_tower()
    inner, outer = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    with package.apply(model) as patch:
        expected = step(model, tower_rows(64))
        patch.compile(backend=inner)
        assert same(step(torch.compile(model, fullgraph=True, backend=outer), tower_rows(64)), expected)
    assert (inner.frame_count, outer.frame_count) == (0, 1)


def test_copies_and_pickles_do_not_change(package) -> None:
    model = block_tower()
    with package.apply(model) as patch:
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        patch.compile(backend="aot_eager")
        expected = step(model, tower_rows(64))
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
            assert same(step(made, tower_rows(64)), expected)


def test_a_nan_is_still_traced_to_its_site(package) -> None:
    model = block_tower()
    with package.apply(model) as patch:
        patch.compile(backend="aot_eager")
        x = tower_rows(64)
        x[3, 5] = torch.nan
        with pytest.raises(dispatch.NonFiniteError, match=r"0\.up"), patch.trace_nonfinite():
            step(model, x)


def test_a_removed_patch_compiles_nothing(package) -> None:
    patch = package.apply(block_tower())
    patch.remove()
    with pytest.raises(dispatch.BindError, match="cannot compile"):
        patch.compile()
