"""Optional kernel libraries: their versions, availability and operators; capabilities of the visible CUDA devices.

A library is imported only by `load_failure` and `loaded_operator`.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch

from loka.devices.spec import OCP
from loka.devices.targets import device_named
from loka.errors import InputError

FP8_CAPABILITY = (8, 9)  # the first compute capability with FP8 tensor cores


@cache
def has_fp8(device: int) -> bool:
    """True if a GPU multiplies the FP8 that LoKA quantizes to; of AMD's, the targets alone."""
    if torch.version.hip is not None:
        found = device_named(torch.cuda.get_device_name(device))
        return found is not None and found.scaled_mm.e4m3 == OCP
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def unsupported_device(capability: tuple[int, int]) -> str | None:
    """Reason why no visible CUDA device has at least this compute capability; None where one has."""
    wanted = f"{capability[0]}.{capability[1]}"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return f"no CUDA device is visible; it needs one of compute capability {wanted}"
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if max(found) >= capability:
        return None
    best = max(found)
    return f"the device's compute capability is {best[0]}.{best[1]}; it needs {wanted}"


@dataclass(frozen=True, slots=True)
class Library:
    """A package that registers operators with torch when one of its modules is imported."""

    name: str  # "FBGEMM GenAI"
    distributions: tuple[str, ...]  # packages that provide it, under any of these names
    oldest: tuple[int, int]  # the first release built for the oldest torch that LoKA supports
    install: str  # the command to install it
    module: str  # module that registers the operators
    operator: str  # "fbgemm::f8f8bf16_rowwise"
    capability: tuple[int, int]  # lowest compute capability that its kernels are built for

    def version(self) -> str | None:
        """The installed version; None where it is not installed. Does not import the library."""
        for distribution in self.distributions:
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return None

    def missing_reason(self) -> str | None:
        """Reason why the installation is not sufficient; None where it is. Does not import the library."""
        version = self.version()
        if version is None:
            return f"{self.name} is not installed: {self.install}"
        if release(version) < self.oldest:
            wanted = ".".join(map(str, self.oldest))
            return f"{self.name} {version} is too old, {wanted} is the first that fits: {self.install}"
        return None

    def load_failure(self) -> str | None:
        """Reason why its module cannot be imported or lacks the operator; None where it works. Imports the module."""
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # it was built for another torch
            return (
                f"{self.name} {self.version() or ''} does not load beside torch {torch.__version__} ({error}): "
                f"{self.install}"
            )
        namespace, _, name = self.operator.partition("::")
        if not hasattr(getattr(torch.ops, namespace), name):
            return f"{self.name} {self.version() or ''} has no operator {self.operator}: {self.install}"
        return None

    def unavailable_reason(self) -> str | None:
        """Reason why its kernels cannot run on this machine; None where they can. Cheap checks come first."""
        return self.missing_reason() or unsupported_device(self.capability) or self.load_failure()


@cache
def loaded_operator(library: Library) -> torch._ops.OpOverload:
    """The library's operator; imports its module on the first call. Raises InputError where that fails."""
    refusal = library.missing_reason() or library.load_failure()
    if refusal is not None:
        raise InputError(f"{library.operator}: {refusal}")
    namespace, _, name = library.operator.partition("::")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return found


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version: (1, 6, 0) for "1.6.0+cu130"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else (0,)
