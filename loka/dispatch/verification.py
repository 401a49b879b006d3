"""Texts of what `Patch.verify` finds: GEMMs that did not run, or ran on other kernels, and static scales exceeded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from loka.dispatch.bind.wrappers import find_module
from loka.dispatch.static_scales import Overflow
from loka.graph.sites.train_eval_diff import is_fused

_NO_FORWARD = (
    "the module's forward did not run: the model was not called, took another branch, was called with other arguments "
    "than planned, ran as a copy, was compiled or captured into a CUDA graph before apply, was replayed since reset, "
    "or had no rows"
)
_NO_BACKWARD = "no backward reached it"


def overflow_advice(package: str, over: tuple[Overflow, ...]) -> str:
    """Text of the warning about overflows of static scales, with advice."""
    head = f"{package}: {len(over)} operands had more than their static scales hold (range: static):"
    advice = (
        "run loka probe again and generate, give a larger amax, or use range: dynamic there; until then "
        "patch.keep(SITE, ...) sends sites back to the model's own GEMMs"
    )
    return "\n  ".join([head, *map(str, over), advice])


def unplanned_kernels(site: str, planned: dict[str, tuple[str, ...]], ran: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Messages about GEMMs that ran on unplanned kernels: the package was edited or belongs to another plan."""
    for gemm, kernels in ran.items():
        if others := [kernel for kernel in kernels if kernel not in planned[gemm]]:
            yield f"{site}: {gemm} ran on {', '.join(others)}, planned was {' or '.join(planned[gemm])}"


def idle_reason(gemms: tuple[str, ...], absent: tuple[str, ...]) -> str:
    """The likely reason why the `absent` GEMMs of a site did not run."""
    if "fprop" in absent:
        return _NO_FORWARD
    if "fprop" not in gemms and absent == gemms:
        return f"{_NO_BACKWARD}, or {_NO_FORWARD}"
    if absent == ("wgrad",) and "dgrad" in gemms:
        return "the weight needed no gradient (requires_grad)"
    if absent == ("dgrad",) and "wgrad" in gemms:
        return "the input needed no gradient"
    return _NO_BACKWARD


def uncalled_reason(root: nn.Module, name: str) -> str | None:
    """Reason why a layer around the module `name` may read its weight without calling it, with advice; or None.

    An nn.MultiheadAttention never calls its children. An nn.TransformerEncoderLayer in evaluation does not if torch
    takes its fused path; that also requires no gradients, no autocast and a batch, which cannot be checked afterwards.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = ".".join(parts[:length])
        layer, shown = find_module(root, around), f" {around!r}" if around else ""
        if isinstance(layer, nn.MultiheadAttention) and type(layer).forward is nn.MultiheadAttention.forward:
            return f"nn.MultiheadAttention{shown} reads its weight and never calls it: keep it (compute: keep)"
        if layer is not None and not layer.training and is_fused(layer) and torch.backends.mha.get_fastpath_enabled():
            return (
                f"in evaluation without gradients torch runs nn.TransformerEncoderLayer{shown} as one fused kernel, "
                "which reads this weight and does not call its module: turn that off by "
                "torch.backends.mha.set_fastpath_enabled(False), or keep this site (compute: keep, or patch.keep)"
            )
    return None
