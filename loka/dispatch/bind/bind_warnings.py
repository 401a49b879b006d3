"""Warnings of binding: a device other than the plan's, and a package without FP8."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from loka.devices.targets import spec_of
from loka.dispatch.bind.bound import CallCounters
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.dispatch_errors import LokaWarning, NoFp8Warning
from loka.kernels.gemm.library import has_fp8


def warn_of_devices(package: str, target: str, bound: Sequence[BoundModule], stacklevel: int) -> None:
    """Warn if bound modules are on the meta device or, unless for "reference", a CPU, a GPU without FP8 or another."""
    devices = {parameter.device for part in bound for parameter in part.module.parameters()}
    if spec_of(target).is_reference:
        devices = {device for device in devices if device.type == "meta"}
    fp8 = _has_planned(part.counters for part in bound)
    notes = [note for device in sorted(devices, key=str) if (note := _note(device, target, fp8))]
    if notes:
        warnings.warn(f"{package}: {'; '.join(notes)}", LokaWarning, stacklevel=stacklevel + 1)


def _note(device: torch.device, target: str, fp8: bool) -> str:
    what = "FP8 GEMMs run" if fp8 else "generated forwards run"
    slow = f"its {what} on the torch reference path, slow but exact (the plan is for {target})"
    if device.type == "meta":
        return "the model is on the meta device, without values: give it weights before it runs (to_empty, then load)"
    if device.type != "cuda":
        return f"the model is on {device.type}: {slow}"
    name = torch.cuda.get_device_name(device)
    if not has_fp8(device.index):
        return f"{device} ({name}) has no FP8 that LoKA can use: {slow}"
    if not spec_of(target).is_named(name):
        return f"{device} is {name}, and the plan was decided for {target}: it runs, but other choices may be faster"
    return ""


@contextmanager
def fp8_not_expected() -> Iterator[None]:
    """Context without NoFp8Warning: for packages that are meant to have no FP8, or of which it was said before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoFp8Warning)
        yield


def warn_without_fp8(package: str, bound: Iterable[CallCounters], stacklevel: int, reported: bool = False) -> None:
    """Warn (NoFp8Warning) if none of the bound modules, each given by its counters, has a GEMM planned in FP8.

    `reported`: the patch is of `loka.fp8`, whose report says why; there is no policy's file to plan.
    """
    modules = list(bound)
    if _has_planned(modules):
        return
    rest = "nothing in this model changes"
    if modules:
        forwards = "1 module gets a" if len(modules) == 1 else f"{len(modules)} modules get a"
        rest = f"{forwards} generated forward with its GEMMs in the model's own dtype"
    why = "patch.report says why" if reported else "run loka plan to see why"
    warnings.warn(
        f"{package}: the package holds no FP8 site: {rest}; {why}",
        NoFp8Warning,
        stacklevel=stacklevel + 1,
    )


def _has_planned(bound: Iterable[CallCounters]) -> bool:
    """True if any of the bound modules has a GEMM planned in FP8."""
    return any(counters.planned(index) for counters in bound for index in range(len(counters.sites)))
