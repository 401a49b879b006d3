"""What a forward depends on outside of its module is compared, and comparing it leaves nothing in the process."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from loka import dispatch
from loka.graph.trace.examples import ModelInputs
from tests.support.models.changed_models import binding_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),
]


class Asking(nn.Module):
    """Its result depends on a query of some state."""

    def __init__(self, query: Callable[[], Any]) -> None:
        super().__init__()
        self.norm, self.linear, self.query = nn.LayerNorm(4), nn.Linear(4, 4), query

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return y * 8.0 if self.query() else y


def bind(model: nn.Module) -> Callable[[nn.Module], dispatch.Patch]:
    """A package of a model's own forward."""
    batches = {rows: ModelInputs((torch.randn(rows, 4),)) for rows in (5, 8)}
    binding, _ = binding_of(model, ("norm", "linear"), batches)
    return lambda live: dispatch.apply(live, "p", (binding,), target="reference")


@contextlib.contextmanager
def in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CFG = SimpleNamespace(on=False)


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    CFG.on = True
    try:
        yield
    finally:
        CFG.on = False


STATES = {
    "a process group": (lambda: dist.is_initialized(), in_a_group),
    "a default of torch": (lambda: torch.get_default_dtype() == torch.float64, in_double),
    "a global object": (lambda: CFG.on, switched_on),
}


@pytest.mark.parametrize("state", STATES)
def test_a_query_of_the_processs_state(state: str) -> None:
    query, changed = STATES[state]
    model = Asking(query)
    apply = bind(model)
    patch = apply(model)
    patch.verify()
    with changed():
        with pytest.raises(dispatch.VerifyError, match=r"is another at test_process_state\.py:\d+ 'ret"):
            patch.verify()
        with pytest.raises(dispatch.BindError, match=r"v2 = mul\(v1, 8.0\), planned was return v1"):
            apply(Asking(query))
    patch.verify()


class Kind(Enum):
    LOW = 0.1
    HIGH = 0.9


def activated(act: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """A class whose forward has a function in its closure."""

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return act(self.linear(self.norm(x)))

    return Activated


def with_default(x: Tensor, act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, act: Callable[[Tensor], Tensor] = act) -> Tensor:
        return act(x)

    return function


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def conditional(on: bool) -> Callable[[Tensor], Tensor]:
    if on:

        def function(x: Tensor) -> Tensor:
            return x * 2
    else:

        def function(x: Tensor) -> Tensor:
            return x * 5

    return function


PAIRS: dict[str, tuple[Any, Any]] = {
    "a function": (torch.relu, torch.tanh),
    "a default": (with_default(torch.ones(1), torch.relu), with_default(torch.ones(1), torch.tanh)),
    "a float": (times(2.0), times(3.0)),
    "a member of an enumeration": (times(Kind.LOW.value), times(Kind.HIGH.value)),
    "a partial": (functools.partial(F.leaky_relu, negative_slope=0.1), functools.partial(F.leaky_relu)),
    "one of two definitions": (conditional(True), conditional(False)),
    "a number of numpy": (times(float(np.array([0.1])[0])), times(float(np.array([0.9])[0]))),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_a_class_has_in_its_closure(kind: str) -> None:
    planned, other = PAIRS[kind]
    apply = bind(activated(planned)())
    apply(activated(planned)()).verify()
    with pytest.raises(dispatch.BindError, match=r"its own forward is another at test_process_state\.py"):
        apply(activated(other)())


class Compilations:
    """A backend that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(scope="module")
def apply() -> Callable[[nn.Module], dispatch.Patch]:
    """Of a package that was applied before: what is imported by then is not what the next one left."""
    bind_again = bind(asking())
    bind_again(asking())
    return bind_again


def asking() -> nn.Module:
    return Asking(lambda: CFG.on)


def compilations(between: Callable[[], object]) -> list[int]:
    """How often a model is compiled with batches of 8, 8 and 9; `between`: what happens after each."""
    torch._dynamo.reset()
    backend, found = Compilations(), []
    compiled = torch.compile(asking(), backend=backend)
    for rows in (8, 8, 9):
        compiled(torch.randn(rows, 4))
        found.append(backend.count)
        between()
    return found


def test_user_code_is_compiled_as_often_as_without(apply: Callable[[nn.Module], dispatch.Patch]) -> None:
    without = compilations(lambda: None)
    assert compilations(lambda: apply(asking())) == without
    assert without[0] < without[2]  # a second size

    def verify(patch: dispatch.Patch) -> None:
        with contextlib.suppress(dispatch.VerifyError):  # nothing ran
            patch.verify()

    patch = apply(asking())
    assert compilations(lambda: verify(patch)) == without


def test_a_bound_model_is_not_compiled_again_for_verify(apply: Callable[[nn.Module], dispatch.Patch]) -> None:
    torch._dynamo.reset()
    model, backend = asking(), Compilations()
    patch = apply(model)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(8, 4)).sum().backward()
    count = backend.count
    patch.verify()
    compiled(torch.randn(8, 4)).sum().backward()
    patch.verify()
    assert backend.count == count


class Passing(TorchDispatchMode):
    """Watches operations."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def state() -> list[object]:
    config = torch._dynamo.config.get_config_copy()
    counters = {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()}
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [config, counters, *modes, *drawn]


@pytest.mark.parametrize(
    "within",
    [
        contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), Passing,
        lambda: FlopCounterMode(display=False), lambda: torch.device("meta"),
    ],
)  # fmt: skip
def test_nothing_is_left_behind(within: Callable[[], Any], apply: Callable[[nn.Module], dispatch.Patch]) -> None:
    model = asking().eval()
    model.norm.train()
    flags = {name: child.training for name, child in model.named_modules()}
    held = {name: {key: id(value) for key, value in vars(child).items()} for name, child in model.named_modules()}
    with within():
        before = state()
        apply(model).remove()
        assert state() == before
    assert {name: child.training for name, child in model.named_modules()} == flags
    assert {name: {k: id(v) for k, v in vars(child).items()} for name, child in model.named_modules()} == held


def test_hooks_that_look_are_no_difference() -> None:
    model, seen = Asking(lambda: False), []
    apply = bind(model)
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    patch = apply(model)
    model(torch.randn(3, 4))
    patch.verify()
    assert seen == ["before", "after"]


def test_where_dynamo_is_off_apply_says_so_and_binds_nothing(apply: Callable[[nn.Module], dispatch.Patch]) -> None:
    model = asking()
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(dispatch.BindError, match=r"torch's Dynamo is off \(TORCHDYNAMO_DISABLE"),
    ):
        apply(model)
    assert not any(isinstance(module, dispatch.Bound) for module in model.modules())
    with torch.compiler.set_stance("force_eager"):
        apply(model)
