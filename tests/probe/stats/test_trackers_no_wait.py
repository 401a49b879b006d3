"""Updates never wait for the device: they run where tensors have no values to ask for, and in few launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loka.numerics.enums import Operand
from loka.probe.stats.moments import JointTracker
from loka.probe.stats.operand_tracker import OperandTracker
from loka.probe.stats.weight_tracker import WeightTracker

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "index.Tensor",
    "item",
)
FREE = ("view", "expand", "split", "slice", "select", "alias", "empty", "unsqueeze", "detach", "unbind", "as_strided")


class Calls(TorchDispatchMode):
    """Names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(function.name().removeprefix("aten::"))
        return function(*args, **(kwargs or {}))

    def launches(self) -> list[str]:
        """Those that start a kernel."""
        return [name for name in self.names if name != "t" and not any(free in name for free in FREE)]


def operand(device: str, width: int) -> Callable[[], None]:
    tracker = OperandTracker(Operand.INPUT, width, device)
    rows = torch.randn(64, width).to(device)
    return lambda: tracker.update(rows, rows.new_ones(width), 640)


def joint(device: str, width: int) -> Callable[[], None]:
    tracker = JointTracker(width, width, device)
    chosen = tracker.input_features.numel()
    rows = torch.randn(64, chosen).to(device)
    return lambda: tracker.update(rows, rows)


def weight(device: str, width: int) -> Callable[[], None]:
    tracker = WeightTracker(24, width, device)
    values: Tensor = torch.randn(24, width).to(device)
    return lambda: tracker.update(values, 1)


@pytest.mark.parametrize("width", [13, 600])
@pytest.mark.parametrize("make", [operand, joint, weight])
def test_updates_run_without_any_value(
    make: Callable[[str, int], Callable[[], None]], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meta device has no values, and refuses whatever would need one: item(), a mask as index, a copy from the host.
    update = make("meta", width)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # it knows no meta device
        update()
        update()
    with Calls() as calls:
        make("cpu", width)()
    assert not [name for name in calls.names if name in WAITING]


def test_the_check_above_refuses_what_waits() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.ones(2, device="meta").any())
    with Calls() as calls:
        rows = torch.ones(3)
        rows[rows > 0].sum().item()
    assert {name for name in calls.names if name in WAITING} == {"index.Tensor", "_local_scalar_dense"}


@pytest.mark.parametrize(("width", "limit"), [(13, 84), (512, 84), (2048, 84)])
def test_an_update_takes_a_bounded_number_of_launches(width: int, limit: int) -> None:
    update = operand("cpu", width)
    update()
    with Calls() as calls:
        update()
    assert len(calls.launches()) <= limit
