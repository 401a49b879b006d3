"""Rendered kernels compiled without a GPU, for sm_90 or another. Importing this skips the test without Triton."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.devices.spec import OCP, DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.launching import listed
from loka.numerics.enums import Format
from tests.support.kernels.rendered_cases import Package, as_taken

triton = pytest.importorskip("triton", reason="Triton compiles kernels; this platform has none")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED = 227 * 1024  # bytes of shared memory that a block can have on sm_90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ROWS, SAMPLES = 64, 8
_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip
_FNUZ = {torch.float8_e4m3fn: "fp8e4b8", torch.float8_e5m2: "fp8e5b16"}  # what stands for these on other devices
_FNUZ_LIMITS = {448.0: 240.0}


@dataclass(frozen=True)
class Launch:
    """What an operator launches: a kernel, and its arguments by name."""

    kernel: Any
    given: Mapping[str, object]  # tensors, None for those that are not there, integers, constants
    warps: int

    def compiled(self, aligned: bool = True, odd: str = "", device: DeviceSpec = DEFAULT) -> Any:
        """The kernel, compiled; arguments are divisible by 16 if `aligned`, except the one that is called `odd`."""
        given, elements = dict(self.given), _TYPES
        if device.scaled_mm.e4m3 != OCP:
            elements = _TYPES | _FNUZ
            given |= {"LIMIT": _FNUZ_LIMITS.get(given["LIMIT"], given["LIMIT"])} if "LIMIT" in given else {}
        constants = {n: v for n, v in given.items() if v is None or n.isupper() or re.fullmatch(r"[A-Z_]+_\d", n)}
        types = {n: f"*{elements[v.dtype]}" if isinstance(v, Tensor) else "i32" for n, v in given.items()}
        known = types | dict.fromkeys(constants, "constexpr")
        places = [i for i, name in enumerate(types) if aligned and name != odd and name not in constants]
        attributes = {(place,): [["tt.divisibility", 16]] for place in places}
        source = ASTSource(fn=self.kernel, signature=known, constexprs=constants, attrs=attributes)
        warps = max(1, self.warps * 32 // device.triton[2])  # as `launch` does it
        return triton.compile(source, target=GPUTarget(*device.triton), options={"num_warps": warps})


def launches(package: Package, spec: Any, element: str = "bf16", **others: str) -> list[Launch]:
    """What the operator of a spec launches for arguments of `element`; `others` names those of other elements."""
    found: list[Launch] = []

    def launch(kernel: Any, grid: object, *arguments: object, constants: tuple[object, ...] = (), num_warps: int):
        given = dict(zip(kernel.arg_names, (*arguments, *constants), strict=True))
        found.append(Launch(kernel, given, num_warps))

    operator = getattr(package.fused, spec.function).operator
    given = as_taken(spec, arguments_like(spec, _ELEMENTS[element], {n: _ELEMENTS[e] for n, e in others.items()}))
    results = operator.outputs(*given)
    operator.launch(package.triton_kernels, listed(results), given, launch)
    return found


def compiled(package: Package, spec: Any, element: str = "bf16", aligned: bool = True, odd: str = "") -> Any:
    """The last kernel that a spec's operator launches, compiled for matrices of `element`."""
    return launches(package, spec, element)[-1].compiled(aligned, odd)


def arguments_like(spec: Any, element: torch.dtype, others: Mapping[str, torch.dtype]) -> list[object]:
    """Tensors without data that a spec's operator takes, one after another."""
    how, width = getattr(spec, "how", None), getattr(spec, "width", 64)
    fp8 = torch.float8_e5m2 if how is not None and how.format is Format.E5M2 else torch.float8_e4m3fn
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **dict.fromkeys(("add", "weight", "bias"), ((width,), element)),
        **dict.fromkeys(("mean", "rstd"), ((ROWS,), torch.float32)),
        **dict.fromkeys(("mean_dn", "mean_dn_n"), ((width,), torch.float32)),
        "mask": ((ROWS, width), torch.uint8),
        "scale": ((1, 1), torch.float32),
        "overflow_stats": ((2,), torch.int64),
        "maxima": ((4,), torch.float32),
        "scale_max": ((4,), torch.float32),
        "partial": ((4, 64), torch.float32),
        "values": ((ROWS, 64), fp8),
    }
    if hasattr(spec, "sizes"):
        sizes, of_sample = spec.sizes, (SAMPLES, spec.sizes.embeddings)
        shapes |= dict.fromkeys(("x", "passed"), ((*of_sample, sizes.dim), element))
        shapes |= {"rank": ((sizes.embeddings, sizes.rank), element), "dproducts": ((*of_sample, sizes.rank), element)}
        shapes |= {"compress": ((sizes.made, sizes.embeddings), element)}
        shapes |= {"dcompressed": ((SAMPLES, sizes.made, sizes.dim), element)}
    if hasattr(spec, "embeddings"):
        shapes |= {"x": ((SAMPLES, spec.embeddings, spec.dim), element)}
        shapes |= {"dproducts": ((SAMPLES, spec.embeddings, spec.embeddings), element)}
    if hasattr(spec, "parts"):
        rows = ROWS // SAMPLES
        shapes |= dict.fromkeys(("residual", "grad"), ((SAMPLES, rows, width), element))
        shapes |= {f"part_{i}": ((SAMPLES, rows // spec.parts, width), element) for i in range(spec.parts)}
    if hasattr(spec, "quantizers"):
        shapes |= {f"weight_{i}": ((ROWS, each.width), element) for i, each in enumerate(spec.quantizers)}
    found: list[object] = []
    for name in spec.parameters:
        kind = re.sub(r"_\d$", "", name)
        shape, dtype = shapes.get(name, shapes.get(kind, ((ROWS, width), element)))
        made = torch.empty(shape, dtype=others.get(kind, dtype), device="meta")
        found.append(torch.float32 if kind == "dtype" else made)
    forward_of_parts = hasattr(spec, "parts") and "grad" not in spec.parameters
    return [*found, element] if hasattr(spec, "adds") or forward_of_parts else found


def spilled(binary: Any, folder: Path) -> int:
    """How many registers of a thread are kept in local memory: nothing else in these kernels has a stack."""
    if not CUOBJDUMP.is_file():
        pytest.skip("this Triton brings no cuobjdump, which tells what a kernel spills")
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    said = subprocess.run([CUOBJDUMP, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return (int(re.search(r"STACK:(\d+)", said).group(1)) + int(re.search(r"LOCAL:(\d+)", said).group(1))) // 4
