"""What `Patch.verify` finds: changes since `apply`, GEMMs that did not run or ran on other kernels, overflows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from loka.dispatch.bind.bound import Bound, stale_sites
from loka.dispatch.bind.check_model import ForwardCheck, changes_since, shown
from loka.dispatch.bind.frozen import is_replaced
from loka.dispatch.bind.wrappers import find_module
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.shard.gather import LOST
from loka.dispatch.static_scales import Overflow
from loka.graph.sites.train_eval_diff import is_fused

_NO_FORWARD = (
    "the module's forward did not run: the model was not called, took another branch, was called with other arguments "
    "than planned, ran as a copy, was compiled or captured into a CUDA graph before apply, was replayed since reset, "
    "or had no rows"
)
_NO_BACKWARD = "no backward reached it"


def changes_of(root: nn.Module, bound: BoundModule, check: ForwardCheck) -> Iterator[str]:
    """Changes to a bound module of `root` that invalidate its counts."""
    name, module = bound.name, bound.module
    if not isinstance(module, Bound) or "forward" in vars(module) or module.loka is not bound.counters:
        yield f"{shown(name)}: lost its generated forward since apply"
        return
    # A wrapper, as LoRA is, may hold it in its place.
    if find_module(root, name) is not module and all(each is not module for each in root.modules()):
        yield f"{shown(name)}: was replaced in the model since apply"
    found = list(changes_since(module, bound.counters.binding, check))
    found += [f"{LOST}: {one.site}" for one in bound.counters.gathered if one.is_lost]
    yield from (f"{shown(name)}: {problem}" for problem in found)
    # What is not there any more cannot be quantized to compare with it; the next call sees what was replaced.
    if not found and not is_replaced(module) and (stale := stale_sites(module)):
        yield f"{', '.join(stale)}: the weight changed since it was frozen: call patch.refresh()"


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
