"""One step of a user's model: its inputs, its outputs, its gradients; and which activities of a device are kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.bench.speed import device_kernels
from loka.bench.speed.device_kernels import DeviceActivity, KernelSum, kernels_among
from loka.bench.speed.user_step import Example, tensors_of, user_step
from loka.errors import InputError


class Two(nn.Module):
    """Two outputs, one of them without a gradient; one Parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.unread = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, ids: Tensor) -> dict[str, Any]:
        return {"score": x[ids] * self.weight, "seen": [ids]}


def example() -> Example:
    x = torch.tensor([[1.0, 2.0], [5.0, 7.0]], requires_grad=True)
    return Example((x,), {"ids": torch.tensor([1, 1])})


def test_inputs_are_copied_in_the_dtype_and_ask_for_a_gradient_where_the_original_does() -> None:
    made = example().fresh("cpu", torch.bfloat16, training=True)
    assert made.args[0].dtype is torch.bfloat16
    assert made.args[0].is_leaf
    assert made.kwargs["ids"].dtype is torch.int64
    assert made.leaves == [made.args[0]]
    assert example().fresh("cpu", torch.float32, training=False).leaves == []
    plain = Example((torch.ones(2), [torch.ones(1), "text"]), {})
    assert plain.fresh("cpu", torch.float32, training=True).leaves == []
    assert plain.fresh("cpu", torch.float32, training=True).args[1][1] == "text"


def test_a_training_step_gives_outputs_and_the_gradients_that_there_are() -> None:
    model, inputs = Two(), example().fresh("cpu", torch.float32, training=True)
    score, ids, by_input, by_weight = user_step(model, inputs, True, model)()
    assert score.tolist() == [[10.0, 21.0], [10.0, 21.0]]
    assert ids.tolist() == [1, 1]
    out = model(*inputs.args, **inputs.kwargs)["score"]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    expected = torch.autograd.grad(out, [inputs.args[0], model.weight], grad)
    torch.testing.assert_close((by_input, by_weight), expected)


def test_an_inference_gives_the_outputs_without_gradients() -> None:
    model = Two()
    score, _ = user_step(model, example().fresh("cpu", torch.float32, False), False, model)()
    assert not score.requires_grad


def test_a_model_without_a_gradient_has_no_training_step() -> None:
    model = nn.Flatten()
    with pytest.raises(InputError, match="no training step to measure"):
        user_step(model, Example((torch.ones(2, 2),), {}), True, model)


def test_tensors_are_found_in_order_wherever_they_are() -> None:
    values = [torch.tensor(float(index)) for index in range(4)]
    nested = {"a": values[0], "b": (values[1], [values[2], None]), "c": values[3], "d": 5}
    assert [float(value) for value in tensors_of(nested)] == [0.0, 1.0, 2.0, 3.0]


def test_copies_and_fills_are_no_kernels() -> None:
    names = ["triton_poi_fused_add_0", "Memcpy DtoD (Device -> Device)", "Memset (Device)", "nvjet_hsh_128x256"]
    assert kernels_among(names) == 2


def test_kernels_are_counted_at_the_second_look_and_a_profiler_that_cannot_be_used_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([["Memset (Device)"], ["one", "two", "Memcpy HtoD"], [], ["Memset (Device)"], ["one"], ["one"]])
    monkeypatch.setattr(device_kernels, "_seen", lambda step: [DeviceActivity(name, 500.0) for name in next(looks)])
    assert device_kernels.kernel_sum_of(lambda: None) == KernelSum(2, 1.5)
    assert device_kernels.kernel_sum_of(lambda: None) is None
    assert device_kernels.launches_of(lambda: None) == 1

    def forbidden(step: object) -> list[DeviceActivity]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(device_kernels, "_seen", forbidden)
    assert device_kernels.kernel_sum_of(lambda: None) is None
    assert device_kernels.launches_of(lambda: None) is None
