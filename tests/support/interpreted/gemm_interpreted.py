"""Run by test_gemm_interpreter.py in a process of its own, with TRITON_INTERPRET=1: indexing and masks of products.

The interpreter multiplies e4m3 exactly but rounds to bfloat16 and e4m3 wrongly: results are compared in float32, and of
e4m3 rows their scales. bfloat16 operands are beyond it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.triton_gemm import gemm_launch
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GemmSpec, GroupedGemm, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates
from loka.numerics.enums import Scaling
from tests.support.interpreted.faster_interpreter import make_faster
from tests.support.kernels.gemm_cases import FAST, Case, blocked, case, write_products
from tests.support.kernels.poison import poisoned

PROGRAMS = 3
ADDED = Epilogue(add=True, out="float32")
ROUNDED = ("values", "product")

SPECS: list[tuple[GemmSpec, tuple[int, ...]]] = [
    *[
        (TiledGemm(n, k, epilogue=ADDED), (1, 17, 133))
        for n, k in ((48, 160), (24, 479), (1, 13), (300, 64), (130, 16))
    ],
    (TiledGemm(48, 160, scaling_a=Scaling.TENSORWISE, scaling_b=Scaling.TENSORWISE, epilogue=ADDED), (17,)),
    (TiledGemm(160, 48, accumulation=FAST, scaling_b=Scaling.TENSORWISE, epilogue=ADDED), (17,)),
    *[
        (TiledGemm(n, k, epilogue=epilogue), (1, 70))
        for n, k in ((24, 77), (256, 48), (300, 64), (512, 77))
        for epilogue in (
            Epilogue(add=True, norm="layer_norm", weight=True, bias=True, activation="silu", out="float32", keep=True),
            Epilogue(norm="rms_norm", weight=True, activation="sigmoid", out="e4m3"),
            Epilogue(add=True, out="e4m3", keep=True),
        )
    ],
    *[(TiledGemm(512, 64, epilogue=blocked(block, out="float32")), (1, 70)) for block in (64, 128, 256)],
    (GroupedGemm(((48, 160), (24, 479), (1, 13), (130, 64)), out="float32"), (1, 70)),
    (GroupedGemm(((130, 64),), out="float32"), (17,)),
]


def near(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of sums; NaN, from memory that was never written, is not near anything."""
    size = expected.abs().amax() if expected.numel() else 0.0
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= 1e-5 * size).all())


def compare(package, spec: GemmSpec, made: Case) -> int:
    """The kernel against its reference; how many results were compared."""
    got = package.launch(spec, *made.arguments)
    for name, expected in package.run(spec, *made.arguments).items():
        if name == "scale_max":
            assert got[name].shape == (PROGRAMS,)
            assert got[name].max() == expected.max(), spec
        elif name in ROUNDED:
            assert got[name].shape == expected.shape
            assert not got[name].float().isnan().any(), spec  # every element was written
        elif name == "scale":
            assert torch.equal(got[name], expected), spec
        else:
            assert near(got[name], expected), (spec, name)
    return len(got)


def main(folder: Path) -> None:
    """All checks, every tiling; prints how many results were compared."""
    packages = []
    for index in range(max(len(candidates(spec)) for spec, _ in SPECS)):
        tiled = [(spec, rows) for spec, rows in SPECS if index < len(candidates(spec))]
        for place, (spec, rows) in enumerate(tiled):
            package = write_products(folder / f"interpreted_{index}_{place}", [spec], candidates(spec)[index])
            packages.append((package, spec, rows))
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS  # as if on a GPU of three
    gemm_launch.multiprocessors = lambda device: PROGRAMS
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
    print(sum(compare(package, spec, case(spec, m)) for package, spec, rows in packages for m in rows))


if __name__ == "__main__":
    make_faster()
    main(Path(sys.argv[1]))
