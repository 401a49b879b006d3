"""Rendered products compile for sm_90 without a GPU: tensor cores on e4m3, descriptors, registers, shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loka.devices.launches import Tiling
from loka.devices.targets import DEFAULT
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GemmSpec, GroupedGemm, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates, is_aligned
from tests.support.kernels.gemm_cases import EPILOGUES, FAST, NORM, PRECISE, ROWS, blocked, write_products
from tests.support.kernels.sm90 import compile_for_sm90, spilled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]


TYPES = {"e4m3": "fp8e4nv", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SPECS: list[GemmSpec] = [
    *[TiledGemm(1024, 1024, accumulation=accumulation) for accumulation in (FAST, PRECISE)],
    TiledGemm(1024, 1024, "bfloat16"),
    *[TiledGemm(512, 512, epilogue=epilogue) for epilogue in EPILOGUES[1:]],
    *[TiledGemm(512, 512, operands, FAST, epilogue=e) for operands in ("e4m3", "bfloat16") for e in (NORM, ROWS)],
    *[TiledGemm(512, 512, epilogue=blocked(block)) for block in (64, 128, 256)],
    TiledGemm(1024, 1024, accumulation=FAST, epilogue=Epilogue(add=True, activation="gelu", out="float32", keep=True)),
    TiledGemm(479, 512, epilogue=NORM),
    *[TiledGemm(n, k) for n, k in ((24, 512), (1, 512), (624, 8256), (8256, 479), (24, 479), (1, 13))],
    *[TiledGemm(n, k, "bfloat16") for n, k in ((24, 512), (8256, 479))],
    TiledGemm(512, 479, accumulation=FAST, epilogue=NORM),
    *[TiledGemm(512, 479, epilogue=blocked(block)) for block in (64, 256)],
    GroupedGemm(((64, 512), (128, 256), (24, 64))),
    GroupedGemm(((64, 512), (24, 479))),
]
LOOPS = SPECS[:3]  # every tiling of each loop over K: how far it fetches ahead, and the order of its tiles


def tilings_of(spec: GemmSpec) -> list[int]:
    """The candidates of a spec that no other stands for: an epilogue sees a tile of sums on so many warps, whatever the
    loop before it was; a whole row leaves the loop so few registers that its depth counts too."""
    found: dict[tuple[int, ...], int] = {}
    for index, tiling in enumerate(candidates(spec)):
        seen: tuple[int, ...] = (tiling.rows, tiling.columns, tiling.warps, tiling.flattened)
        if spec in LOOPS:
            seen = (index,)
        elif isinstance(spec, GroupedGemm) or spec.epilogue.whole_rows:
            seen = (*seen, tiling.depth, tiling.stages)
        found.setdefault(seen, index)
    return list(found.values())


CASES = [(spec, index) for spec in SPECS for index in tilings_of(spec)]


def argument_type(spec: GemmSpec, name: str, tiling: Tiling) -> str:
    """The type of a kernel's argument, by its name."""
    kind, _, form = re.sub(r"_\d", "", name).rpartition("_")
    if form not in ("ptr", "desc"):
        return "i32"
    out = spec.epilogue.out if isinstance(spec, TiledGemm) else spec.out
    vectors = {"values": "fp8e4nv", "product": "bf16", "add": "bf16", "weight": "bf16", "bias": "bf16"}
    element = TYPES[spec.operands] if kind in ("a", "b") else TYPES[out] if kind == "out" else vectors.get(kind, "fp32")
    if form == "ptr":
        return f"*{element}"
    block = [tiling.rows, tiling.columns]
    if kind in ("a", "b"):
        block = [tiling.rows if kind == "a" else tiling.columns, tiling.depth]
    return f"tensordesc<{element}[{block[0]}, {block[1]}]>"


def kernels_of(package, spec: GemmSpec, tiling: Tiling):
    """(name, compiled) of each kernel that is launched."""
    text = package.kernels[spec.function].text
    for name, options in re.findall(r"^ +(_\w+)\[.*?\]\((.*?)^    \S", text + "\n    x", re.MULTILINE | re.DOTALL):
        kernel = getattr(package.triton_kernels, name)
        types = {argument: argument_type(spec, argument, tiling) for argument in kernel.arg_names}
        aligned = [index for index, argument in enumerate(kernel.arg_names) if types[argument].startswith("*")]
        launched = {key: int(value) for key, value in re.findall(r"(num_\w+)=(\d+)", options)}
        yield name, compile_for_sm90(kernel, types, aligned, **launched)


def reads_by_descriptor(spec: GemmSpec) -> bool:
    """Whether a spec's kernel has operands that a descriptor can read."""
    shapes = spec.shapes if isinstance(spec, GroupedGemm) else ((spec.n, spec.k),)
    return any(is_aligned(k, spec.operands) for _, k in shapes)


@pytest.mark.parametrize(("spec", "index"), CASES, ids=lambda value: getattr(value, "function", str(value)))
def test_it_compiles_for_hopper(spec, index, tmp_path):
    tiling = candidates(spec)[index]
    package = write_products(tmp_path / f"{spec.function}_{index}", [spec], tiling)
    launched = list(kernels_of(package, spec, tiling))
    assert launched
    for name, binary in launched:
        ptx = binary.asm["ptx"]
        assert binary.metadata.shared <= DEFAULT.shared_bytes
        # Rows of 512 in e4m3 are 128 sums and as many results a thread: a few registers more than there are.
        full = isinstance(spec, TiledGemm) and spec.n > 256 and spec.epilogue.quantize
        assert spilled(binary, tmp_path) <= (12 if full else 2), name
        products = re.findall(r"wgmma\.mma_async\S*", ptx)
        assert products
        assert all(("e4m3" in product) == (spec.operands == "e4m3") for product in products)
        assert ("cp.async.bulk.tensor.2d.shared" in ptx) == reads_by_descriptor(spec)


def sums_outside_the_tensor_core(folder: Path, spec: TiledGemm) -> int:
    """Additions of float32 in a product without any in its epilogue."""
    package = write_products(folder / spec.function, [spec])
    ((_, binary),) = kernels_of(package, spec, candidates(spec)[0])
    return len(re.findall(r"add\S*\.f32", binary.asm["ptx"]))


def test_precise_sums_are_added_up_in_float32(tmp_path):
    relu = Epilogue(activation="relu")
    assert sums_outside_the_tensor_core(tmp_path, TiledGemm(1024, 1024, accumulation=FAST, epilogue=relu)) == 0
    assert sums_outside_the_tensor_core(tmp_path, TiledGemm(1024, 1024, epilogue=relu)) == 128 * 128 // (
        8 * 32
    )  # all of a thread's
