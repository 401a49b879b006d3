"""Tests of arguments and sizes: conditions of the call, or refused with the true reason."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import outputs_differ, with_forward
from loka.graph.fingerprint import changed_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace import other_calls
from loka.graph.trace.examples import ExampleCall, Examples
from loka.graph.trace.trace import trace_forward
from tests.support.models import planned_models as models

WIDTH = 8


class Weighted(nn.Module):
    """What the cases vary: one product, and a test of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))


def trace(module: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]], **options: Any) -> ForwardIR | Refused:
    examples = tuple(ExampleCall(batch, args, kwargs) for batch, (args, kwargs) in zip((4, 7), calls, strict=True))
    return trace_forward(module, "m", Examples("m", examples), **{"sites": ("w",), **options})


def two(**kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Two calls with a tensor of another batch each, and the same further arguments."""
    return [((torch.randn(batch, 3, WIDTH),), kwargs) for batch in (4, 7)]


class Optional(Weighted):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = x @ self.w
        return y if mask is None else y * mask


class Either(Weighted):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = bias or torch.zeros(WIDTH)
        return x @ self.w + bias


class Flags(Weighted):
    def forward(self, x: Tensor, mode: str = "sum", keep: bool = True, steps: int = 2) -> Tensor:
        y = x @ self.w
        if mode == "sum" and keep and steps > 1:
            return y.sum(1)
        return y


class Types(Weighted):
    def forward(self, x: Any, extra: Any = ()) -> Tensor:
        if isinstance(x, (list, tuple)) or type(x) == list or not torch.is_tensor(x):  # noqa: E721
            x = torch.cat(x)
        if hasattr(extra, "append"):
            x = x + 1
        return x @ self.w


class Sizes(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and x.ndim == len(x.shape) and x.shape[1] == 3 and x.size(-1) % 8 == 0:
            x = sum(x[:, part] for part in range(x.shape[1]))
        return x @ self.w


class SameSizes(Weighted):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError("other shapes")
        return (x + y) @ self.w


class Own:
    """A class of which a package cannot make another object."""


class OfOwn(Weighted):
    def forward(self, x: Tensor, key: Any = None) -> Tensor:
        return x @ self.w if isinstance(key, Own) else x


@pytest.mark.parametrize(
    ("module", "calls", "guards", "others"),
    [
        (Optional(), two(), ("mask is None",), {"mask": torch.rand(WIDTH)}),
        (Optional(), two(mask=torch.rand(WIDTH)), ("mask is not None",), {"mask": None}),
        (Either(), two(), ("bias is None",), {"bias": torch.ones(1)}),
        (Flags(), two(), ("steps > 1", "mode == 'sum'", "keep is True"), {"steps": 1}),
        (
            Types(),
            two(),
            ("isinstance(x, torch.Tensor)", "type(extra) is tuple", "len(extra) == 0"),
            {"extra": []},
        ),
    ],
    ids=["absent", "given", "or", "flags", "types"],
)
def test_a_test_of_an_argument_is_a_guard(
    module: nn.Module, calls: Any, guards: tuple[str, ...], others: dict[str, Any]
) -> None:
    answer = trace(module, *calls)
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == guards
    bound = with_forward(copy.deepcopy(module), answer)
    for args, kwargs in calls:
        assert torch.equal(bound(*args, **kwargs), module(*args, **kwargs))
    (x,), kwargs = calls[0]
    with pytest.raises(InputError):
        bound(x, **{**kwargs, **others})


def test_sizes_that_do_not_depend_on_the_batch_are_guards() -> None:
    answer = trace(Sizes(), *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("x.dim() == 3", "x.shape[1] == 3", "(x.shape[2] % 8) == 0")
    module, x = Sizes(), torch.randn(9, 3, WIDTH)
    bound = with_forward(copy.deepcopy(module), answer)
    assert torch.equal(bound(x), module(x))
    assert not any("%" in step.text() or "==" in step.text() for step in answer.statements)
    for other in (x[:, :2], x[:, 0], x[:, None]):
        with pytest.raises(InputError):
            bound(other)


class Repeats(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[-1] = x.shape[-1]
        return (x * self.w[0].view(shape) + sum((1.0,) * x.ndim)) @ self.w


class RepeatsByTheBatch(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + sum([1.0] * x.shape[0])


def test_a_list_is_repeated_as_often_as_a_number_says_that_is_the_same_in_all_calls() -> None:
    module, calls = Repeats(), two()
    answer = trace(module, *calls)
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("x.dim() == 3",)
    bound = with_forward(copy.deepcopy(module), answer)
    for args, kwargs in calls:
        torch.testing.assert_close(bound(*args, **kwargs), module(*args, **kwargs))
    refused = trace(RepeatsByTheBatch(), *calls)
    assert "depends on the number of rows: x.shape[0] == 4 at test_conditions.py:" in str(refused)


def test_sizes_that_depend_on_the_batch_may_be_compared_with_one_another() -> None:
    calls = [((torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)), {}) for batch in (4, 7)]
    answer = trace(SameSizes(), *calls)
    assert isinstance(answer, ForwardIR), answer
    sizes = ("x.shape[0] == y.shape[0]", "x.shape[1] == y.shape[1]")
    assert answer.guards == ("x.dim() == 2", "y.dim() == 2", *sizes)
    assert [step.op for step in answer.statements] == ["add", "linear"]


class OfTheModule(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.names = ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.w
        if weight is None or weight.shape[0] != WIDTH or not isinstance(self.names, list) or callable(self.names):
            return x
        y = x @ weight
        if y is None or not isinstance(y, Tensor) or type(y) is list:
            return x
        return y if self.scale == 1.0 else y * self.scale


def test_what_the_module_holds_is_a_constant() -> None:
    module = OfTheModule()
    answer = trace(module, *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("self.scale == 1.0",)
    assert [step.op for step in answer.statements] == ["linear"]
    assert answer.fingerprint is not None
    module.scale = 2.0
    assert changed_forward(module, (), answer.fingerprint, {}) is not None
    module.scale = 1.0
    assert changed_forward(module, (), answer.fingerprint, {}) is None
    module.names = print  # type: ignore[assignment]
    assert changed_forward(module, (), answer.fingerprint, {}) is not None


class Attends(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=False)
        return (y @ self.w) if weights is None and y is not None else weights


def test_one_of_several_results_of_torch_may_be_none() -> None:
    answer = trace(Attends(), *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ()
    assert answer.statements[-1].op == "linear"


class Inside(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).unsqueeze(1)
        return y.squeeze(1) if y.dim() == 4 and len(y.shape) == 4 else y


class OfSome(Inside):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.flatten(1).sum(-1) > -1e9])


def test_a_size_that_follows_from_the_arguments_is_checked_with_them() -> None:
    answer = trace(Inside(), *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("x.dim() == 3",)
    for shape in ((1, 3, WIDTH), (9, 3, WIDTH)):
        assert with_forward(Inside(), answer)(torch.randn(shape)).dim() == 3
    with pytest.raises(InputError):
        with_forward(Inside(), answer)(torch.randn(4, WIDTH))


def test_a_size_of_a_computed_tensor_is_checked_by_those_of_the_arguments() -> None:
    answer = trace(OfSome(), *two())
    assert isinstance(answer, ForwardIR), answer
    with pytest.raises(InputError):
        with_forward(OfSome(), answer)(torch.randn(4, WIDTH))


class OneRow(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).squeeze()
        return y + 1 if y.dim() == 3 else y


class SomeRows(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w)[:4]
        return y + 1 if y.shape[0] == 4 else y


def test_one_row_that_is_treated_apart_is_a_condition() -> None:
    module = OneRow()
    answer = trace(module, *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.guards == ("x.shape[0] != 1", "x.dim() == 3")
    bound = with_forward(copy.deepcopy(module), answer)
    for rows in (2, 300):
        x = torch.randn(rows, 3, WIDTH)
        assert torch.equal(bound(x), module(x))
    with pytest.raises(InputError):
        bound(torch.randn(1, 3, WIDTH))


def test_a_number_of_rows_that_decides_is_refused() -> None:
    answer = trace(SomeRows(), *two())
    assert isinstance(answer, Refused), answer
    assert answer.reason.startswith("depends on the number of rows: at batch 2, traced, it gives other outputs (")


def check_shape(x: Tensor, *expected: int | None) -> None:
    actual = tuple(x.shape)
    if len(actual) != len(expected) or any(e is not None and a != e for a, e in zip(actual, expected, strict=True)):
        raise ValueError(f"{actual}, not {expected}")


class Raises(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        check_shape(x, None, 3, WIDTH)
        batch, *rest = x.shape
        assert rest == [3, WIDTH], f"{batch}: {rest}"
        assert all(a == b for a, b in zip(x.shape[1:], (3, WIDTH), strict=True))
        torch._assert(list(x.size())[2] == WIDTH, "columns")
        torch._check(x.dim() == 3, lambda: "three dimensions")
        if tuple(x.shape[1:]) != (3, WIDTH):
            raise ValueError(f"wrong shape: {tuple(x.shape)}")
        y = x @ self.w
        check_shape(y, None, 3, WIDTH)
        return y


def test_checks_of_shapes_however_they_are_written() -> None:
    answer = trace(Raises(), *two())
    assert isinstance(answer, ForwardIR), answer
    assert [step.op for step in answer.statements] == ["linear"]
    assert set(answer.guards) == {"x.shape[1] == 3", "x.shape[2] == 8", "x.dim() == 3"}


class Called(Weighted):
    """As in ports from Keras."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(*args, **kwargs)

    def call(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = x @ self.w
        return y if scale is None else y * scale


def test_any_number_of_arguments_is_that_of_all_calls() -> None:
    answer = trace(Called(), *two())
    assert isinstance(answer, ForwardIR), answer
    assert answer.arguments == ("*args", "**kwargs")
    assert answer.guards == ("len(args) == 1", "list(kwargs) == []", "args[0] is not None")
    named = trace(Called(), *two(scale=torch.randn(WIDTH)))
    assert isinstance(named, ForwardIR), named
    assert named.guards[:2] == ("len(args) == 1", "list(kwargs) == ['scale']")
    assert named.guards[2:] == ("args[0] is not None", "kwargs['scale'] is not None")
    with pytest.raises(InputError):
        with_forward(Called(), answer)(torch.randn(4, 3, WIDTH), torch.randn(WIDTH))
    (x, y), none = torch.randn(2, 4, 3, WIDTH), dict[str, Any]()
    refused = trace(Called(), ((x,), none), ((x, y), none))
    assert isinstance(refused, Refused)
    assert refused.reason == "is called in several ways: len(args) == 1 in one call, and not in another"


class Sentinel(Weighted):
    def forward(self, x: Tensor, key: Any = None) -> Tensor:
        return x @ self.w if x is key else x @ self.w + 1


class OnADevice(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.device.type == "cpu" else x


class OnADtype(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.dtype == torch.float32 else x


class OfAChild(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.child = Optional()

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return x @ self.w if y is None else x @ self.w + y


class Elements(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.numel() == 0 else x @ self.w


class Mask(Weighted):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x @ self.w if mask else x


REFUSED = [
    (Optional(), [two()[0], two(mask=torch.rand(WIDTH))[1]], r"called in several ways: mask is None in one call, and"),
    (Flags(), [two()[0], two(keep=False)[1]], r"called in several ways: keep is True in one call, and not in another"),
    (OnADtype(), two(), r"other operations on bfloat16 arguments at test_conditions.py:\d+ 'return x @ self.w if"),
    (OfOwn(), two(key=Own()), r"among its arguments is a .*\.Own, which a package cannot describe"),
    (Mask(), two(mask=torch.ones(1)), r"ata-dependent branching.* at test_conditions.py:\d+ 'return x @ self.w if"),
]


@pytest.mark.parametrize(("module", "calls", "reason"), REFUSED, ids=lambda each: type(each).__name__)
def test_what_differs_or_cannot_be_known_is_refused_with_the_true_reason(
    module: nn.Module, calls: Any, reason: str
) -> None:
    answer = trace(module, *calls)
    assert isinstance(answer, Refused), answer
    assert re.search(reason, answer.reason), answer.reason


@pytest.mark.parametrize(
    ("module", "calls"),
    [(Flags(), two(steps=3)), (Elements(), two()), (OfAChild(), two()), (OnADevice(), two())],
    ids=lambda each: type(each).__name__,
)
def test_what_holds_in_all_calls_is_no_reason(module: nn.Module, calls: Any) -> None:
    answer = trace(module, *calls)
    assert isinstance(answer, ForwardIR), answer
    bound = with_forward(copy.deepcopy(module), answer)
    for rows in (1, 2, 7, 300):
        x = torch.randn(rows, 3, WIDTH)
        assert torch.equal(bound(x), module(x))


class Named(Weighted):
    def forward(self, x: Tensor, len: Any = None) -> Tensor:
        return x @ self.w


class OfTypes(Weighted):
    def forward(self, x: Any, isinstance: Any = None) -> Tensor:
        return only_tensors(x) @ self.w


def test_an_argument_with_the_name_of_a_function_that_a_condition_needs_is_refused() -> None:
    assert isinstance(trace(Named(), *two()), ForwardIR)
    answer = trace(OfTypes(), *two())
    assert isinstance(answer, Refused)
    assert "argument 'isinstance' has a name that the generated text needs for itself" in answer.reason


def only_tensors(x: Any) -> Any:
    return x if isinstance(x, Tensor) else None


def test_a_layer_with_optional_arguments_is_one_forward() -> None:
    layer = models.SequenceLayer()
    calls = []
    for batch in (4, 7):
        x, *_ = models.sequence_inputs(batch)
        calls.append(((x, torch.rand(batch, models.LENGTH) > 0.3), {}))
    answer = trace(layer, *calls, sites=("project", "out"), inline=("bias",))
    assert isinstance(answer, ForwardIR), answer
    assert set(answer.guards) >= {
        "x.shape[1] <= 6",
        "cache is None",
        "times is None",
        "mask is not None",
        "self.temperature == 1.0",
    }


def test_a_model_over_lists_of_features_is_one_forward() -> None:
    model = models.ClickModel()
    calls = [((models.click_inputs(batch),), {}) for batch in (4, 7)]
    answer = trace(model, *calls, sites=("tower.0", "tower.2"))
    assert isinstance(answer, ForwardIR), answer
    assert {"list(x) == ['item', 'user', 'age']", "compile is False"} <= set(answer.guards)
    bound, x = with_forward(copy.deepcopy(model), answer), models.click_inputs(9)
    assert torch.equal(bound(x), model(x))
    for other in ((x, True), ({**x, "weight": torch.ones(9)},)):
        with pytest.raises(InputError):
            bound(*other)


def test_a_layer_that_takes_a_fast_path_by_its_own_mode_alone_has_one_mode_of_all_as_a_condition() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    answer = trace(layer, *two(), sites=("linear1",), inline=("norm1", "norm2"))
    assert isinstance(answer, ForwardIR), answer
    assert {"self.dropout.training == self.training", "self.self_attn.training == self.training"} < set(answer.guards)
    bound = with_forward(copy.deepcopy(layer), answer).eval()
    bound.dropout.train()
    with pytest.raises(InputError), torch.no_grad():
        bound(torch.randn(4, 3, WIDTH))


@dataclass
class Batch:
    x: Tensor
    ids: Tensor


class OfManyRows(Weighted):
    def forward(self, batch: Batch) -> Tensor:
        y = batch.x @ self.w
        return y if y[:100].shape[0] < 100 else y * 2


def test_arguments_in_a_dataclass_are_tried_at_other_numbers_of_rows() -> None:
    calls = [((Batch(torch.randn(rows, WIDTH), torch.zeros(rows)),), dict[str, Any]()) for rows in (4, 7)]
    answer = trace(OfManyRows(), *calls)
    assert isinstance(answer, Refused), answer
    assert "depends on the number of rows" in answer.reason


@pytest.mark.parametrize(("length", "most"), [(3, 300), (2048, 128), (2**16, 8)])
def test_long_sequences_are_compared_on_fewer_samples(monkeypatch: pytest.MonkeyPatch, length: int, most: int) -> None:
    compared: list[int] = []

    def noted(ours: nn.Module, theirs: nn.Module, call: ExampleCall, *options: Any) -> str | None:
        compared.append(len(call.args[0]))
        return outputs_differ(ours, theirs, call, *options)

    monkeypatch.setattr(other_calls, "outputs_differ", noted)
    calls = [((torch.randn(batch, length, WIDTH),), {}) for batch in (4, 7)]
    assert isinstance(trace(OfAChild(), *calls), ForwardIR)
    assert compared[:3] == [2, 7, most]


@torch.library.custom_op("conditions::sums", mutates_args=())
def sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sums of rows by offsets; as FBGEMM's operators it trusts them, and here it tells of those that it must not."""
    PAST_THE_END.extend(each for each in (int(offsets.max()) - len(values),) if each > 0)
    parts = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.stack([values[start:end].sum(0) for start, end in parts])


@sums.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, values.shape[1])


def keep_lengths(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.lengths = inputs[1].diff()


sums.register_autograd(lambda ctx, grad: (grad.repeat_interleave(ctx.lengths, 0), None), setup_context=keep_lengths)
PAST_THE_END: list[int] = []


class Jagged(Weighted):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return sums(x @ self.w, offsets)


class JaggedChild(Weighted):
    """The operator is in a child that is called as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Jagged()

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.child(x @ self.w, offsets)


@pytest.mark.parametrize("kind", [Jagged, JaggedChild])
def test_no_made_up_sizes_reach_operators_of_another_library(kind: type[nn.Module]) -> None:
    """Which may read past the end of their arguments; instead such calls are the module's own."""
    PAST_THE_END.clear()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((torch.randn(5 * batch, WIDTH), torch.arange(0, 5 * batch + 1, 5)), {}) for batch in (4, 7)
    ]
    found = trace(kind(), *calls)
    assert isinstance(found, ForwardIR), found
    assert PAST_THE_END == []
    ranks = {"x.dim() == 2", "offsets.dim() == 1", "x.shape[0] != 1", "offsets.shape[0] != 1"}
    assert ranks <= set(found.guards)
