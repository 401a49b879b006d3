"""The machine that a measurement ran on."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT, DEVICES, GPUS, NO_RTX, device_named
from loka.errors import InputError
from loka.version import __version__


@dataclass(frozen=True, slots=True)
class Environment:
    """Device name and versions; None for what is not installed."""

    device: str
    loka: str
    python: str
    torch: str
    cuda: str | None
    triton: str | None
    torchao: str | None
    fbgemm: str | None

    def __str__(self) -> str:
        found = [f"torch {self.torch}", f"CUDA {self.cuda}", f"Triton {self.triton}", f"Python {self.python}"]
        found += [f"torchao {self.torchao}" if self.torchao else "no torchao"]
        found += [f"FBGEMM {self.fbgemm}" if self.fbgemm else "no FBGEMM"]
        return f"{self.device}; {', '.join(found)}; LoKA {self.loka}"


def require_gpu(verb: str = "loka bench") -> None:
    """Raise InputError unless the current device is a GPU of a target's architecture and Triton is installed.

    `verb` is named in messages.
    """
    if not torch.cuda.is_available():
        raise InputError(
            f"{verb}: no CUDA device is visible, and times of the reference path would say nothing; run it on a "
            f"machine with an {GPUS} and a CUDA build of torch (loka doctor shows what this one has)"
        )
    capability = torch.cuda.get_device_capability()
    if not any(spec.capability == capability for spec in DEVICES.values()):
        if capability[0] == 12:
            raise InputError(f"{verb}: {NO_RTX}; this machine has {torch.cuda.get_device_name()}")
        known = " or ".join(dict.fromkeys(_architecture(spec) for spec in DEVICES.values()))
        raise InputError(
            f"{verb}: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; the "
            f"generated kernels are for {known}; run it on an {GPUS}"
        )
    if version_of("triton", "pytorch-triton") is None:
        raise InputError(f"{verb}: Triton is not installed; install it: pip install 'triton>=3.6'")


def device_here() -> DeviceSpec:
    """The spec of the current CUDA device; the default target's if there is none or it is not a target."""
    found = device_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return found or DEFAULT


def _architecture(spec: DeviceSpec) -> str:
    return f"{spec.architecture} ({spec.capability[0]}.{spec.capability[1]})"


def environment() -> Environment:
    """The environment of the current CUDA device, or of the CPU without one."""
    return Environment(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        loka=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        triton=version_of("triton", "pytorch-triton"),
        torchao=version_of("torchao"),
        fbgemm=version_of("fbgemm-gpu-genai", "fbgemm-gpu-genai-nightly"),
    )


def version_of(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
