"""This machine's versions, devices, libraries and FP8 path, for `loka doctor`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata, util

import torch

from loka.kernels.gemm import catalogue
from loka.kernels.gemm.catalogue import Kernel
from loka.kernels.gemm.library import FP8_CAPABILITY
from loka.version import __version__

OLDEST = {"torch": (2, 11), "triton": (3, 6)}  # oldest supported and tested versions


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the report. `status` is ok, missing, stale or problem; only a problem keeps LoKA from working."""

    name: str
    status: str
    found: str
    note: str


@dataclass(frozen=True, slots=True)
class Optional:
    """An optional library."""

    name: str
    module: str
    distributions: tuple[str, ...]  # any of these provides the module
    use: str
    install: str
    gpu_only: bool


LIBRARIES = (
    Optional("torchao", "torchao", ("torchao",), "peer to compare with", "pip install 'loka[torchao]'", False),
    Optional("torchrec", "torchrec", ("torchrec",), "models of torchrec", "pip install 'loka[torchrec]'", False),
)


def examine() -> tuple[Item, ...]:
    """Examine the machine. Imports torch, and kernel libraries unless it is already clear that they cannot run."""
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return (
        Item("loka", "ok", __version__, ""),
        _python(),
        _torch(),
        _triton(),
        *_devices(capabilities),
        *(_library(library, gpu=bool(capabilities)) for library in LIBRARIES),
        *(_kernel(kernel) for kernel in catalogue.GEMM_KERNELS),
        _path(capabilities),
    )


def _python() -> Item:
    found = platform.python_version()
    fine = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    return Item("python", "ok" if fine else "problem", found, "" if fine else "LoKA needs Python 3.11 or newer")


def _torch() -> Item:
    return _version_item("torch", str(torch.__version__), "pip install 'torch>=2.11'")


def _triton() -> Item:
    version = _distribution_version(("triton", "pytorch-triton"))
    if version is None:
        return Item("triton", "missing", "", "not needed without a GPU; comes with torch on Linux")
    return _version_item("triton", version, "pip install 'triton>=3.6'")


def _version_item(name: str, version: str, install: str) -> Item:
    oldest = OLDEST[name]
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if parts >= oldest:
        return Item(name, "ok", version, "")
    wanted = ".".join(map(str, oldest))
    return Item(name, "problem", version, f"LoKA needs {name} {wanted} or newer: {install}")


def _devices(capabilities: list[tuple[int, int]]) -> list[Item]:
    if not capabilities:
        return [Item("device", "ok", "CPU", "no CUDA device is visible")]
    items = []
    for index, capability in enumerate(capabilities):
        fp8 = "has" if capability >= FP8_CAPABILITY else "has no"
        note = f"compute capability {capability[0]}.{capability[1]}, {fp8} FP8 tensor cores"
        items.append(Item(f"device {index}", "ok", torch.cuda.get_device_name(index), note))
    return items


def _library(library: Optional, gpu: bool) -> Item:
    version = _distribution_version(library.distributions)
    if not _has_module(library.module):
        return Item(library.name, "missing", version or "", f"{library.use}: {library.install}")
    if library.gpu_only and not gpu:
        return Item(library.name, "missing", version or "installed", f"{library.use}; cannot run here: it needs a GPU")
    return Item(library.name, "ok", version or "installed", library.use)


def _kernel(kernel: Kernel) -> Item:
    """An item that says if a kernel can run here, or why not; plans for other machines may use it anyway."""
    version = kernel.library.version() if kernel.library is not None else None
    reason = kernel.unavailable_reason()
    note = "can run here" if reason is None else f"cannot run here: {reason}"
    return Item(f"kernel {kernel.name}", "ok" if reason is None else "missing", version or "", note)


def _has_module(name: str) -> bool:
    parent = name.partition(".")[0]
    if util.find_spec(parent) is None:
        return False
    try:
        return parent == name or util.find_spec(name) is not None
    except (ImportError, OSError):  # finding a submodule imports its parent, whose native libraries may not load
        return False


def _distribution_version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _path(capabilities: list[tuple[int, int]]) -> Item:
    if any(capability >= FP8_CAPABILITY for capability in capabilities):
        return Item("FP8 path", "ok", "tensor cores", "GEMMs run on the kernels that a plan names")
    why = "no GPU" if not capabilities else "no GPU with FP8 tensor cores"
    return Item(
        "FP8 path", "ok", "reference", f"{why}: FP8 is computed by torch, right and slow, with the same rounding"
    )
