"""Generated forwards run the module's own for other arguments than planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loka.codegen.modules.signature import own_forward_lines, parse_argument
from loka.errors import LokaError
from loka.plan.serialize import from_json, to_json
from tests.support.codegen.policy_packages import policy_packages
from tests.support.models import planned_models as models

POLICY = """
version: 1
name: sequence_layers
model:
  factory: "tests.support.models.planned_models:sequence_model"
  inputs: "tests.support.models.planned_models:sequence_inputs"
  batch_size: 64
target: reference
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
"""


def lines(guards: list[str], *arguments: str) -> list[str]:
    return own_forward_lines(guards, [parse_argument(each) for each in arguments], 4)


def test_the_check_is_one_condition_and_one_call() -> None:
    assert lines([], "x") == []
    assert lines(["mask is None", "mode == 'sum'"], "x", "/", "mask=None", "*", "mode='sum'")[1:] == [
        '    if mask is not None or mode != "sum":',
        "        return super().forward(x, mask, mode=mode)",
    ]


def test_any_number_of_arguments_is_passed_on() -> None:
    assert lines(["len(args) == 1"], "x", "*args", "deep=True", "**kwargs")[-1] == (
        "        return super().forward(x, *args, deep=deep, **kwargs)"
    )


def test_many_conditions_have_a_line_each() -> None:
    guards = [f"argument_{number} is None" for number in range(6)]
    found = lines(guards, *(f"argument_{number}=None" for number in range(6)))[1:]
    assert found[:3] == ["    if (", "        argument_0 is not None", "        or argument_1 is not None"]
    assert found[7] == "    ):"
    assert found[8].startswith("        return super().forward(argument_0, ")


def test_a_condition_on_an_unknown_name_is_refused() -> None:
    with pytest.raises(LokaError, match="'os' is unknown"):
        lines(["os.name == 'nt'"], "x")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("sequence")
    with pytest.MonkeyPatch.context() as patch, policy_packages(Path(folder)) as make:
        patch.chdir(folder)
        plan, files, package = make("sequence_layers", POLICY)
        assert from_json(to_json(plan)) == plan
        assert "or cache is not None\n" in files["modules.py"] or "or cache is not None or" in files["modules.py"]
        yield package


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_other_arguments_run_the_modules_own_forward(package: ModuleType, mode: str) -> None:
    model = models.sequence_model()
    own = copy.deepcopy(model)
    patch = package.apply(model, mode=mode)
    bound, layer, (x,) = model.layers[0], own.layers[0], models.sequence_inputs(3)
    mask, times = torch.rand(3, models.LENGTH) > 0.3, torch.rand(3, models.LENGTH)
    cache = (torch.rand(()), torch.rand(()))
    with torch.set_grad_enabled(mode == "train"):
        planned = bound(x, mask)
        assert not torch.equal(planned, layer(x, mask))
        torch.testing.assert_close(planned, layer(x, mask), rtol=0.2, atol=0.2)
        torch.testing.assert_close(bound(x, mask, times), layer(x, mask, times), rtol=0.2, atol=0.2)  # a child's test
        for args, kwargs in [((x,), {}), ((x, None, times), {}), ((x, mask), {"cache": cache}), ((x[:, :4],), {})]:
            assert torch.equal(bound(*args, **kwargs), layer(*args, **kwargs))
        with pytest.raises(ValueError, match="expected three dimensions, got 2"):
            bound(x[0], mask)
        bound.temperature = layer.temperature = 2.0
        assert torch.equal(bound(x, mask), layer(x, mask))
        bound.temperature = 1.0
        assert torch.equal(bound(x, mask), planned)
    patch.remove()
    assert type(bound) is models.SequenceLayer


@pytest.mark.slow
def test_compiled_it_has_no_graph_break_and_takes_either_way(package: ModuleType) -> None:
    model = models.sequence_model()
    own = copy.deepcopy(model)
    package.apply(model)
    bound, layer = model.layers[0], own.layers[0]
    torch.compiler.reset()
    compiled = torch.compile(bound, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        (x,) = models.sequence_inputs(rows)
        mask = torch.rand(rows, models.LENGTH) > 0.3
        torch.testing.assert_close(compiled(x, mask), bound(x, mask))
        assert not torch.equal(compiled(x, mask), layer(x, mask))
        assert torch.equal(compiled(x), layer(x))
        gradients = [torch.autograd.grad(each(x).sum(), [*each.parameters()][-1]) for each in (compiled, layer)]
        assert torch.equal(gradients[0][0], gradients[1][0])


@pytest.mark.slow
def test_verify_says_that_no_call_was_as_planned(package: ModuleType) -> None:
    model = models.sequence_model()
    patch = package.apply(model)
    (x,) = models.sequence_inputs(3)
    for layer in model.layers:
        layer(x).sum().backward()
    with pytest.raises(Exception, match="was called with other arguments than planned"):
        patch.verify()
