"""Formulas for torch's FLOP counter, so that `FlopCounterMode` counts what a bound model multiplies."""

from __future__ import annotations

from itertools import chain

from loka.kernels.fused import operators
from loka.kernels.gemm import gemm_operator


def register_flop_formulas() -> None:
    """Register those of all operators that there are now; the counter takes the formulas of when it is made."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula  # its import takes 0.3 s

    for operator, formula in chain(gemm_operator.flop_formulas(), operators.flop_formulas()):
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
