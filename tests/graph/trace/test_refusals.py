"""Forwards that are hard to read: each is the same function afterwards, or is refused with the reason and the line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from loka.errors import InputError
from loka.graph.equivalence import with_forward
from loka.graph.fingerprint import changed_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples, ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.models import ir_models as zoo

_LINE = r" at ir_models.py:\d+ "
REFUSED = {
    zoo.NoGrad: rf"enters 'with torch.no_grad\(\)'{_LINE}'gate = torch.sigmoid\(x\)'",
    zoo.Autocast: rf"enters 'with torch.autocast\(...\)'{_LINE}'return x @ self.w'",
    zoo.Checkpointed: rf"calls tag_activation_checkpoint, which has a graph of its own{_LINE}",
    zoo.TrainingBranch: rf"does other operations in training than in evaluation{_LINE}'x = x \* 2'",
    zoo.BufferAssigned: r"changes self in each call, and a graph keeps no Python state",
    zoo.Counter: r"changes self.calls in each call, and a graph keeps no Python state",
    zoo.NamedThis: r"changes self.calls in each call, and a graph keeps no Python state",
    zoo.Cache: r"changes self.cache in each call, and a graph keeps no Python state",
    zoo.Length: rf"depends on the number of rows: x.shape\[0\] == 4{_LINE}'return torch.stack",
    zoo.Iterates: rf"depends on the number of rows: x.shape\[0\] == 4{_LINE}'return torch.stack",
    zoo.DataBranch: rf"ata-dependent branching.*{_LINE}'if x.sum\(\) > 0:'",
    zoo.SizeBranch: rf"depends on the number of rows: x.shape\[0\] <= 1024{_LINE}'if x.size\(0\) > 1024:'",
    # in torch's words: before 2.14 it did not read this function
    zoo.LayerDrop: rf"(Random.random|Data-dependent branching).*{_LINE}'return x if random.random",
    zoo.Decorated: rf"enters 'with torch.no_grad\(\)'{_LINE}'return ",
    zoo.AsksForGrad: rf"does other operations without gradients{_LINE}",
    zoo.HelperWithBlock: rf"enters 'with torch.no_grad\(\)'{_LINE}'return ",
    zoo.BlockInABranchTaken: rf"enters 'with torch.no_grad\(\)'{_LINE}'return ",
    zoo.FunctionWithBlock: rf"enters 'with torch.no_grad\(\)'{_LINE}'return ",
    zoo.Uncovered: r"'w' goes into 'abs' before any GEMM, and only views are followed at ir_models",
    zoo.OwnGradient: rf"calls autograd_function_apply, which has a graph of its own{_LINE}'return Clip.apply",
    zoo.ClampsAGradient: r"registers a hook on the gradient of x in each call",
    zoo.Pieces: rf"depends on the number of rows: \(\(999 \+ x.shape\[0\]\) // 1000\) == 1{_LINE}'return torch.cat",
    zoo.AsksAnArgument: r"without gradients",
    zoo.SetItem: rf"assignment into a tensor{_LINE}'y\[:, 0\] = 0'",
    zoo.BufferInPlace: rf"changes a tensor in place: self.seen.add_\(1\){_LINE}'self.seen.add_\(1\)'",
}
EQUAL = (
    zoo.Plain, zoo.FunctionalDropout, zoo.FloatAttribute, zoo.LiveNoise, zoo.Keywords,
    zoo.IteratesParts, zoo.IteratesBesideModules, zoo.Roots, zoo.TypeTest, zoo.OptionalMask, zoo.FlagBranch,
    zoo.RandomConstant, zoo.Arange, zoo.BlockInAMethodNotCalled,
    zoo.BlockInABranchNotTaken, zoo.Variadic, zoo.FloatInMath, zoo.FloatInConfig, zoo.FloatsInList, zoo.Item,
    zoo.DeviceAttribute, zoo.FromAList, zoo.LayoutBranch, zoo.Tries,
)  # fmt: skip


def examples(*shapes: tuple[int, ...]) -> Examples:
    return Examples("trap", tuple(ExampleCall(shape[0], (torch.randn(shape),), {}) for shape in shapes))


def trace(module: nn.Module, **options: object) -> ForwardIR | Refused:
    return trace_forward(module, "trap", examples((4, zoo.WIDTH), (7, zoo.WIDTH)), sites=("w",), **options)  # type: ignore[arg-type]


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output, the gradients, the buffers and the next random number, after a fixed seed."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    return (y, *grads, *module.buffers(), torch.rand(1))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_trace_would_lose_is_refused_with_its_place(kind: type[nn.Module]) -> None:
    answer = trace(kind())
    assert isinstance(answer, Refused), answer
    assert re.search(REFUSED[kind], answer.reason), answer.reason
    assert str(answer).startswith("NOT PATCHED region 'trap': ")


@pytest.mark.parametrize("kind", EQUAL, ids=lambda kind: kind.__name__)
def test_what_can_be_traced_is_the_same_function_at_sizes_that_the_gate_has_not_seen(kind: type[nn.Module]) -> None:
    module = kind()
    answer = trace(module)
    assert isinstance(answer, ForwardIR), answer
    for rows in (1, 2, 7, 300):
        x = torch.randn(rows, 8)
        for mode in (True, False):
            bound = with_forward(copy.deepcopy(module), answer).train(mode)
            for a, b in zip(run(copy.deepcopy(module).train(mode), x), run(bound, x), strict=True):
                assert torch.equal(a, b)


class OverAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH))

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.cat([feature @ self.w for feature in features])


def called_with(*lists: list[Tensor]) -> Examples:
    return Examples("trap", tuple(ExampleCall(len(each[0]), (each,), {}) for each in lists))


def test_a_loop_over_a_list_is_unrolled_where_it_is_always_as_long() -> None:
    two, three = ([torch.randn(batch, zoo.WIDTH) for _ in range(3)] for batch in (2, 3))
    answer = trace_forward(OverAList(), "trap", called_with(two, three), sites=("w",))
    assert isinstance(answer, ForwardIR), answer
    assert sum(step.call is not None for step in answer.statements) == 3
    bound = with_forward(OverAList(), answer)
    assert bound(three).shape == (9, zoo.WIDTH)
    for other in ([*three, three[0]], tuple(three)):
        with pytest.raises(InputError):
            bound(other)
    answer = trace_forward(OverAList(), "trap", called_with(two, three[:2]), sites=("w",))
    assert isinstance(answer, Refused)
    assert answer.reason == "is called in several ways: len(features) == 3 in one call, and not in another"


class OverADictionary(OverAList):
    def forward(self, features: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return torch.cat([feature @ self.w for name, feature in features.items()])


class OverKeys(OverAList):
    def forward(self, features: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        found = [features[name] @ self.w for name in features if name != "c"]
        return torch.cat([*found, *features.values(), *(features[name] for name in features)])


class AsksForAKey(OverAList):
    def forward(self, features: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        y = features["a"] @ self.w
        return y + features["b"] if "b" in features else y


def called_with_names(*names: str) -> Examples:
    calls = ({name: torch.randn(rows, zoo.WIDTH) for name in names} for rows in (2, 3))
    return Examples("trap", tuple(ExampleCall(len(next(iter(each.values()))), (each,), {}) for each in calls))


@pytest.mark.parametrize("kind", [OverADictionary, OverKeys, AsksForAKey])
def test_a_loop_over_a_dictionary_is_unrolled_where_its_keys_are_always_the_same(kind: type[OverAList]) -> None:
    module = kind()
    answer = trace_forward(module, "trap", called_with_names("a", "b"), sites=("w",))
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("list(features) == ['a', 'b']",)
    bound = with_forward(kind(), answer)
    bound.load_state_dict(module.state_dict())
    features = {name: torch.randn(4, zoo.WIDTH) for name in "ab"}
    assert torch.equal(bound(features), module(features))
    for other in (dict(reversed(features.items())), {"a": features["a"]}, {**features, "c": features["a"]}):
        with pytest.raises(InputError):
            bound(other)


def test_a_loop_over_a_dictionary_of_other_keys_in_each_call_is_refused_for_that() -> None:
    calls = (called_with_names(names).calls[0] for names in "ab")
    answer = trace_forward(OverADictionary(), "trap", Examples("trap", tuple(calls)), sites=("w",))
    assert isinstance(answer, Refused)
    assert answer.reason == "is called in several ways: list(features) == ['a'] in one call, and not in another"


class KeepsAFunction(nn.Module):
    """A lambda as an attribute, which knows the module as a variable of the method around it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH)), 0.5
        self.act = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(x @ self.w)
        return out


@pytest.mark.parametrize("act", [None, torch.relu, lambda x: torch.relu(x) * 2])
def test_a_function_that_the_module_keeps_is_read(act: Callable[[Tensor], Tensor] | None) -> None:
    module = KeepsAFunction()
    module.act = act or module.act
    calls = Examples("trap", tuple(ExampleCall(n, (torch.randn(n, zoo.WIDTH),), {}) for n in (2, 3)))
    answer = trace_forward(module, "trap", calls, sites=("w",))
    assert isinstance(answer, ForwardIR), answer
    bound, x = with_forward(copy.copy(module), answer), torch.randn(7, zoo.WIDTH)
    assert torch.equal(bound(x), module(x))


class Sides(nn.Module):
    """Something else for arguments that lie otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w = zoo.weight()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.is_contiguous() else x


def test_a_forward_that_asks_for_the_layout_is_refused() -> None:
    answer = trace(Sides())
    assert isinstance(answer, Refused)
    assert answer.reason == "depends on the layout of its arguments in memory"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [zoo.Roots, zoo.IteratesBesideModules])
def test_roots_of_sizes_and_loops_compile_for_every_batch(kind: type[nn.Module]) -> None:
    module = kind()
    answer = trace(module)
    assert isinstance(answer, ForwardIR)
    bound = with_forward(copy.deepcopy(module), answer)
    torch.compiler.reset()
    compiled = torch.compile(bound, fullgraph=True, dynamic=True, backend="eager")
    for rows in (3, 5):
        x = torch.randn(rows, zoo.WIDTH)
        assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize(
    ("kind", "inline", "holder", "name"),
    [
        (zoo.FloatAttribute, (), "", "scale"),
        (zoo.WithNorm, ("norm",), "norm", "gain"),
    ],
)
def test_a_float_is_a_condition(kind: type[nn.Module], inline: tuple[str, ...], holder: str, name: str) -> None:
    module = kind()
    answer = trace(module, inline=inline)
    assert isinstance(answer, ForwardIR)
    bound, x = with_forward(copy.deepcopy(module), answer), torch.randn(3, 8)
    torch.testing.assert_close(bound(x), module(x))
    setattr(bound.get_submodule(holder), name, 3.0)
    with pytest.raises(InputError):
        bound(x)


class Sums(nn.Module):
    """A norm by sums, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self._eps, self.steps = 0.001, 2.5

    def forward(self, y: Tensor) -> Tensor:
        return y / ((y * y).sum(-1, keepdim=True) / zoo.WIDTH + self._eps).sqrt() * self.steps


class Explores(nn.Module):
    """Its epsilon is no norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.norm, self.epsilon = zoo.weight(), Sums(), 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x @ self.w)
        made: Tensor = (1 - self.epsilon) * y + self.epsilon * y.mean(-1, keepdim=True)
        return made


def test_each_float_of_a_norm_by_hand_is_a_condition() -> None:
    module = Explores()
    answer = trace(module, inline=("norm",))
    assert isinstance(answer, ForwardIR)
    assert answer.fingerprint is not None
    texts = [statement.text() for statement in answer.statements]
    assert any("rms_norm(matmul, (8,), None, 0.001)" in text for text in texts), texts
    assert not any(name in text for text in texts for name in ("self.norm._eps", "self.norm.steps", "self.epsilon"))
    assert set(answer.guards) == {"self.epsilon == 0.5", "self.norm._eps == 0.001", "self.norm.steps == 2.5"}
    bound, x = with_forward(copy.deepcopy(module), answer), torch.randn(3, 8)
    torch.testing.assert_close(bound(x), module(x))
    for changed, planned in (
        ((module.norm, "_eps", 2.0), (module.norm, "_eps", 0.001)),
        ((module, "epsilon", 0.1), (module, "epsilon", 0.5)),
    ):
        setattr(*changed)
        assert "its own forward is another" in str(changed_forward(module, ("norm",), answer.fingerprint, {}))
        setattr(*planned)
        assert changed_forward(module, ("norm",), answer.fingerprint, {}) is None
    for holder, name in ((bound.norm, "_eps"), (bound, "epsilon")):
        before = getattr(holder, name)
        setattr(holder, name, 0.25)
        with pytest.raises(InputError):
            bound(x)
        setattr(holder, name, before)


def test_signature_and_defaults_are_kept() -> None:
    answer = trace(zoo.Keywords())
    assert isinstance(answer, ForwardIR)
    assert answer.arguments == ("x", "/", "scale=2.0", "*", "shift=-1.0")
    module = zoo.Keywords()
    bound, x = with_forward(copy.deepcopy(module), answer), torch.randn(3, 8)
    assert torch.equal(bound(x, scale=2.0, shift=-1.0), module(x, scale=2.0, shift=-1.0))
    assert torch.equal(bound(x, 2.0), module(x, 2.0))
    for other in ({"scale": 3.0}, {"shift": 0.5}):
        with pytest.raises(InputError):
            bound(x, **other)


def test_the_module_is_left_as_it_was() -> None:
    module = zoo.WithBuffer().eval()
    given, before, random_state = examples((4, 8), (7, 8)), copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert isinstance(trace_forward(module, "trap", given, sites=("w",)), ForwardIR)
    assert type(module) is zoo.WithBuffer
    assert not module.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class WithChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = zoo.weight()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.w)


def test_a_child_with_hooks_is_called_and_not_inlined() -> None:
    module = WithChild()
    module.act.register_forward_hook(lambda *_: None)
    refused = trace(module, inline=("act",))
    assert isinstance(refused, Refused)
    assert "child 'act' has hooks, which would no longer run" in refused.reason
    called = trace(module)
    assert isinstance(called, ForwardIR)
    assert called.statements[-1].text() == "act = self.act(matmul)"


def test_a_parametrised_child_is_not_inlined() -> None:
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    answer = trace_forward(module, "trap", examples((4, 8), (7, 8)), sites=("0",))
    assert isinstance(answer, Refused)
    assert "'0'" in answer.reason


def test_a_child_that_is_its_own_fsdp_unit_is_not_inlined() -> None:
    module = WithChild()
    module.act.__class__ = type("FSDPReLU", (FSDPModule, nn.ReLU), {})
    answer = trace(module, inline=("act",))
    assert isinstance(answer, Refused)
    assert "child 'act' is a FSDPReLU, whose forward cannot be inlined" in answer.reason


def test_a_parametrised_parameter_is_not_covered() -> None:
    module = zoo.Plain()
    nn.utils.parametrize.register_parametrization(module, "w", nn.Identity())
    answer = trace_forward(module, "trap", examples((4, 8), (7, 8)), sites=("parametrizations.w.original",))
    assert isinstance(answer, Refused)


def test_a_forward_that_was_replaced_on_the_instance_is_refused() -> None:
    module = zoo.Plain()
    module.forward = lambda x: x  # type: ignore[method-assign,assignment]
    answer = trace(module)
    assert isinstance(answer, Refused)
    assert "replaced on the instance" in answer.reason


def test_a_module_without_storage_is_refused() -> None:
    answer = trace(zoo.Plain().to("meta"))
    assert isinstance(answer, Refused)
    assert (
        "'w' is on the meta device, and forwards are run to be checked: build the model with weights" in answer.reason
    )


def test_a_class_without_source_is_read() -> None:
    scope: dict[str, object] = {"Plain": zoo.Plain, "__name__": "nowhere"}
    exec("class Made(Plain):\n    def forward(self, x):\n        return x @ self.w * 3\n", scope)  # noqa: S102
    module = scope["Made"]()  # type: ignore[operator]
    answer = trace(module)
    assert isinstance(answer, ForwardIR), answer
    x = torch.randn(3, zoo.WIDTH)
    assert torch.equal(with_forward(copy.deepcopy(module), answer)(x), module(x))


class Runs(nn.Module):
    """One function of its input."""

    def __init__(self, run: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.w, self.run = zoo.weight(), run

    def forward(self, x: Tensor) -> object:
        return self.run(self, x @ self.w)


def outside(_: Any, x: Tensor) -> Tensor:
    return x + OUTSIDE


OUTSIDE = torch.ones(zoo.WIDTH)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: [x + place for place in range(x.size(0))], "depends on the number of rows: x.shape[0] == 4 at"),
        (lambda m, x: x * [1, 2, 3, 4, 5][x.size(0)], "depends on the number of rows: x.shape[0] == 4 at"),
        (lambda m, x: x * {4: 2, 7: 3}[x.size(0)], "depends on the number of rows: x.shape[0] == 4 at"),
        (lambda m, x: m.missing, "'Runs' object has no attribute 'missing'"),
        (outside, "reads the global OUTSIDE, which is neither an argument nor of the module"),
    ],
)
def test_the_reason_says_why(run: Callable[[nn.Module, Any], object], reason: str) -> None:
    refused = trace(Runs(run))
    assert isinstance(refused, Refused), refused
    assert reason in refused.reason


def test_torch_warns_of_nothing_on_a_trial_batch(recwarn: pytest.WarningsRecorder) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    batches = {rows: ModelInputs((torch.randn(rows, 4),)) for rows in (2, 3)}
    (found,) = capture_examples(module, [""], batches).values()
    assert isinstance(trace_forward(module, "", found, inline=["0", "1"], sites=["0"]), ForwardIR)
    assert not recwarn.list


class AsksWhetherItIsTraced(zoo.Plain):
    def forward(self, x: Tensor) -> Tensor:
        torch.fx._symbolic_trace.is_fx_tracing()
        return x @ self.w


def test_torch_logs_nothing_of_a_model_that_asks_whether_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = torch.fx._symbolic_trace.log
    monkeypatch.setattr(log, "handle", lambda record: None if log.disabled else said.append(record.getMessage()))
    log.warning("heard")
    trace(AsksWhetherItIsTraced())
    assert said == ["heard"]


class Scores(NamedTuple):
    y: Tensor
    x: Tensor


@dataclass
class Result:
    y: Tensor
    x: Tensor


class Returns(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.w, self.kind = zoo.weight(), kind

    def forward(self, x: Tensor) -> Any:
        return {"scores": [self.kind(y=x @ self.w, x=x)]}


@pytest.mark.parametrize("kind", [Scores, Result])
def test_a_result_of_a_class_of_the_users_is_refused_for_that(kind: type) -> None:
    answer = trace(Returns(kind))
    assert isinstance(answer, Refused), answer
    assert answer.reason.startswith(f"returns a {kind.__name__}, which generated code cannot make")
    assert isinstance(trace(Returns(dict)), ForwardIR)
