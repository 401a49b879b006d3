"""What kernels write is remembered for our kernels, by the types and numbers that they are launched with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loka.kernels import decomposition


@pytest.fixture
def found():
    asked: list[object] = []

    def find(kernel: object, arguments: dict[str, object], *rest: object) -> list[str]:
        asked.append(kernel)
        return [name for name in arguments if name.startswith("out")]

    return decomposition._remembered(find), asked


def kernel(ours: bool) -> SimpleNamespace:
    """A kernel as Triton's JITFunction has it: `fn` is its Python function."""
    made = SimpleNamespace(fn=lambda: None)
    if ours:
        made.__dict__[decomposition._WRITES] = {}
    return made


def test_the_same_types_are_asked_for_once(found) -> None:
    remembered, asked = found
    ours = kernel(ours=True)
    for rows in (4, 8):
        arguments = {"x_ptr": torch.zeros(rows), "out_ptr": torch.zeros(rows), "WIDTH": 64}
        assert remembered(ours, arguments, {}) == ["out_ptr"]
        assert remembered(SimpleNamespace(fn=ours, configs=[]), arguments, {}) == ["out_ptr"]  # as Autotuner wraps it
    assert asked == [ours]


@pytest.mark.parametrize("change", [{"x_ptr": torch.zeros(4).half()}, {"WIDTH": 128}, {"out_2_ptr": torch.zeros(4)}])
def test_other_types_and_numbers_are_asked_for_again(found, change: dict[str, object]) -> None:
    remembered, asked = found
    ours, arguments = kernel(ours=True), {"x_ptr": torch.zeros(4), "out_ptr": torch.zeros(4), "WIDTH": 64}
    remembered(ours, arguments, {})
    assert remembered(ours, {**arguments, **change}, {})[0] == "out_ptr"
    assert len(asked) == 2


def test_kernels_of_others_are_always_asked_for(found) -> None:
    remembered, asked = found
    other = kernel(ours=False)
    for _ in range(2):
        remembered(other, {"out_ptr": torch.zeros(4)}, {})
    assert asked == [other, other]
