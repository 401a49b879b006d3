"""Check that a package's planned kernels can run on the devices of its modules, before anything is bound."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from loka.dispatch.bind.check_model import ModuleMatch
from loka.errors import InputError
from loka.kernels.gemm.catalogue import kernel_named
from loka.kernels.gemm.gpu_here import has_fp8

SHOWN = 3  # most sites named for a kernel


def library_problems(matches: Iterable[ModuleMatch], mode: str) -> list[str]:
    """A line for each planned kernel that cannot run on the modules' devices: reason, sites, advice.

    On the CPU and on GPUs without FP8 every kernel runs by its reference; only an unknown kernel is a problem there.
    """
    planned: dict[str, dict[str, bool]] = {}  # kernel -> site -> True if it is on a GPU with FP8
    for match in matches:
        for site, kernels in zip(match.sites, match.binding.planned_kernels(mode), strict=True):
            for kernel in kernels:
                planned.setdefault(kernel, {})[site] = _on_fp8(match.module)
    problems = []
    for kernel, sites in planned.items():
        reason = _unsupported_reason(kernel, any(sites.values()))
        if reason is not None:
            problems.append(
                f"kernel {kernel!r}, planned for {_listed(list(sites))}: {reason}; or write another `kernel` or "
                "`compute: keep` for these sites in the policy and run loka generate again"
            )
    return problems


def _unsupported_reason(name: str, on_fp8: bool) -> str | None:
    try:
        kernel = kernel_named(name)
    except InputError as error:
        return f"{error}; upgrade LoKA"
    return kernel.unavailable_reason() if on_fp8 else None


def _on_fp8(module: nn.Module) -> bool:
    devices = {parameter.device for parameter in module.parameters()}
    return any(device.type == "cuda" and has_fp8(device.index) for device in devices)


def _listed(sites: list[str]) -> str:
    shown = ", ".join(repr(site) for site in sites[:SHOWN])
    return shown if len(sites) <= SHOWN else f"{shown} and {len(sites) - SHOWN} more"
