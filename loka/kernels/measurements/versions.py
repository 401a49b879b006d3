"""The machine that a kernel was measured on: the device, and the versions that its time and results depend on."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import torch

from loka.devices.targets import GPUS, spec_of
from loka.errors import InputError

DRIVER_FILE = Path("/proc/driver/nvidia/version")
MAPS_FILE = Path("/proc/self/maps")  # lists the libraries that this process has loaded
_DRIVER_TEXT = 96  # bytes that NVML needs for a driver's version, with the terminator
_WORDS = {"cuda": "CUDA", "cublas": "cuBLAS", "triton": "Triton"}


@dataclass(frozen=True, slots=True, order=True)
class Versions:
    """A machine as a key: times measured on one do not hold for another. "" for an unknown version."""

    device: str  # "NVIDIA H100 80GB HBM3"
    capability: str  # "9.0"
    driver: str
    cuda: str  # that torch was built with
    cublas: str  # of the library that torch has loaded
    torch: str
    triton: str
    library: str  # version of the kernel's own library; "" for torch's, Triton's and LoKA's kernels

    @classmethod
    def here(cls, library: str = "") -> Versions:
        """Versions of the current CUDA device. Raises InputError where there is none."""
        if not torch.cuda.is_available():
            raise InputError(
                f"no CUDA device is visible, so there is nothing to measure on; record on a machine with an {GPUS} "
                "and a CUDA build of torch (loka doctor shows what this one has)"
            )
        major, minor = torch.cuda.get_device_capability()
        return cls(
            device=torch.cuda.get_device_name(),
            capability=f"{major}.{minor}",
            driver=_driver(),
            cuda=torch.version.cuda or "",
            cublas=_cublas(),
            torch=str(torch.__version__),
            triton=_installed("triton", "pytorch-triton"),
            library=library,
        )

    @property
    def machine(self) -> Versions:
        """The same without the kernel's own library: common to all kernels of one recording."""
        return replace(self, library="")

    def is_of(self, target: str) -> bool:
        """True if a target of policies ("h100") includes this device. A MIG slice of a GPU is another device."""
        return spec_of(target).is_named(self.device)

    def differences(self, here: Versions) -> tuple[str, ...]:
        """A line for each field, except the library, in which `here` differs from the measured machine."""
        pairs = ((field.name, getattr(self, field.name), getattr(here, field.name)) for field in fields(self)[:-1])
        return tuple(difference(_WORDS.get(name, name), mine, theirs) for name, mine, theirs in pairs if mine != theirs)

    def __str__(self) -> str:
        named = (("driver", self.driver), ("CUDA", self.cuda), ("cuBLAS", self.cublas), ("torch", self.torch))
        parts = [f"{word} {version}" for word, version in (*named, ("Triton", self.triton)) if version]
        return ", ".join([self.device, *parts])


def difference(what: str, measured: str, here: str) -> str:
    """Text of a difference: `driver: measured with 575.57.08, this machine has 580.65.06`."""
    return f"{what}: measured with {measured or 'an unknown one'}, this machine has {here or 'none that is known'}"


def _installed(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _driver() -> str:
    """The driver's version from NVML, which every driver includes, otherwise from the kernel module."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(_DRIVER_TEXT)
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_DRIVER_TEXT)) == 0:
                    return text.value.decode("ascii", "replace")
            finally:
                nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one without these functions
        pass
    try:
        return driver_in(DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return ""


def driver_in(text: str) -> str:
    """The version in the text of /proc/driver/nvidia/version; "" where there is none."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else ""


def _cublas() -> str:
    """The version that the loaded cuBLASLt reports; "" where none is loaded."""
    try:
        maps = MAPS_FILE.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"(/\S*libcublasLt\.so\S*)", maps)
        if found is None:
            return ""
        ask = ctypes.CDLL(found.group(1)).cublasLtGetVersion
    except (OSError, AttributeError):
        return ""
    ask.restype = ctypes.c_size_t
    return cublas_words(int(ask()))


def cublas_words(number: int) -> str:
    """cuBLAS's version number as text: "13.1.1" for 130101."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
