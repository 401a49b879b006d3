"""A bound model against its own, where FP8 rounds nothing: the numbers have to be the same."""

from __future__ import annotations

from types import ModuleType

from torch import nn

from benchmarks.random_models.comparison import Case, difference, run
from benchmarks.random_models.judge import exact_fp8


def check_exact_numbers(own: nn.Module, bound: nn.Module, inputs: ModuleType, autocast: bool = False) -> None:
    """Outputs, gradients and buffers at two batch sizes, in training and evaluation; `inputs` has `example_inputs`."""
    for rows, mode in ((8, "training"), (33, "training"), (33, "evaluation")):
        case = Case(rows, mode, autocast=autocast, gradients=True, loss=1.0, seed=3)
        expected = run(own, inputs, case)
        with exact_fp8():
            found = run(bound, inputs, case)
        assert expected.raised is None
        assert difference(expected, found, case) is None
