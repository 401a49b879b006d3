"""Search for the first site that produces or reads a NaN or an infinity."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka.dispatch.dispatch_errors import NonFiniteError
from loka.numerics.enums import GEMM_NAMESPACE, OPERANDS, Gemm

_SOURCES = {
    "input": "feeds this site in the forward",
    "weight": "was written to its weight",
    "grad_output": "follows this site, in the backward",
}


class NonFiniteTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every FP8 GEMM whose counter id is in `names` (id -> site, GEMM), forward and backward.

    autograd propagates the mode to its backward threads.
    """

    def __init__(self, names: dict[int, tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == GEMM_NAMESPACE:
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            named.update(kwargs or {})
            if (label := self.names.get(named["counter_id"])) is not None:
                self.seen += 1
                _check(*label, named, out)
        return out


def _check(site: str, gemm: str, arguments: dict[str, Any], out: torch.Tensor) -> None:
    """Raise NonFiniteError if an operand or, with finite operands, the result is not finite."""
    for operand, matrix, scale in zip(OPERANDS[Gemm(gemm)], ("a", "b"), ("scale_a", "scale_b"), strict=True):
        if not (_finite(arguments[matrix]) and _finite(arguments[scale])):
            raise NonFiniteError(
                f"{site} ({gemm}): its {operand} was not finite before the GEMM: the NaN or infinity comes from what "
                f"{_SOURCES[operand]}, the first place where one was seen",
                site,
                gemm,
            )
    if not _finite(out):
        raise NonFiniteError(
            f"{site} ({gemm}): finite operands gave a result of {tuple(out.shape)} that is not finite in {out.dtype}, "
            "the first place where one was seen",
            site,
            gemm,
        )


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.float()).all())
