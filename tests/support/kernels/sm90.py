"""Rendered kernels compiled for sm_90 without a GPU. Importing this skips the test where there is no Triton."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from loka.kernels.fused.quantization import ROWWISE
from loka.numerics.enums import Format

triton = pytest.importorskip("triton", reason="Triton compiles kernels; this platform has none")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

SHARED = 227 * 1024  # bytes of shared memory that a block can have on sm_90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_for_sm90(
    kernel: Any,
    types: Mapping[str, str],
    aligned: Iterable[int],
    constants: Mapping[str, int] | None = None,
    **options: int,
) -> Any:
    """Compile a kernel for arguments of these types, of which those at `aligned` are divisible by 16, as allocations
    and most sizes are; `constants` are its tl.constexpr parameters, `options` those of a launch, such as num_warps."""
    constants = constants or {}
    names, known = list(types), types | dict.fromkeys(constants, "constexpr")
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned if names[index] not in constants}
    source = ASTSource(fn=kernel, signature=known, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def kernel_of(package: Any, spec: Any) -> tuple[Any, dict[str, int], int]:
    """A spec's kernel in a package, its tl.constexpr parameters and its warps."""
    rendered = package.kernels[spec.function]
    for launch in rendered.launches:
        if launch.width == spec.width:
            kernel = getattr(package.triton_kernels, launch.kernel)
            names = kernel.arg_names[len(kernel.arg_names) - len(launch.constants) :]
            return kernel, dict(zip(names, launch.constants, strict=True)), launch.warps
    return getattr(package.triton_kernels, f"_{spec.function}"), {}, warps_of(rendered)


def warps_of(rendered: Any) -> int:
    """The warps that a rendered kernel is launched with."""
    return int(re.search(r"num_warps=(\d+)", rendered.text).group(1))


_OF_MODEL = ("x", "grad", "add", "weight", "bias", "out", "dx", "total", "times", "residual", "kept", "plain",
             "residual_grad_in", "residual_grad_out")  # fmt: skip


def pointer_type(name: str, element: str, format: Format = Format.E4M3) -> str:
    """The type of a kernel's pointer, by its name, where matrices and vectors of the model are of `element`."""
    kind = re.sub(r"_\d", "", name).removesuffix("_ptr")
    if kind in ("values", "transposed"):
        return "*fp8e4nv" if format is Format.E4M3 else "*fp8e5"
    known = {"overflow": "*i32", "overflow_stats": "*i64", **dict.fromkeys(_OF_MODEL, f"*{element}")}
    return known.get(kind, "*fp32")


def compiled(package: Any, spec: Any, element: str = "bf16", aligned: bool = True, odd: str = "") -> Any:
    """A spec's kernel of a package, compiled for matrices of `element`; the argument `odd` is never aligned."""
    kernel, constants, warps = kernel_of(package, spec)
    format = getattr(spec, "how", ROWWISE).format
    types = {name: pointer_type(name, element, format) if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    places = [index for index, name in enumerate(types) if aligned and name != odd]
    return compile_for_sm90(kernel, types, places, constants, num_warps=warps)


def spilled(binary: Any, folder: Path) -> int:
    """How many registers of a thread are kept in local memory: nothing else in these kernels has a stack."""
    if not CUOBJDUMP.is_file():
        pytest.skip("this Triton brings no cuobjdump, which tells what a kernel spills")
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    said = subprocess.run([CUOBJDUMP, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return (int(re.search(r"STACK:(\d+)", said).group(1)) + int(re.search(r"LOCAL:(\d+)", said).group(1))) // 4
