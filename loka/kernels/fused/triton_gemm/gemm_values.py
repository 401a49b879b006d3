"""Template values of GEMMs in Triton: the layout of a tile, and words for the docstrings."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.launches import Tiling
from loka.errors import InputError
from loka.kernels.fused.cast_transpose.matrix_spec import endings
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.triton_gemm.gemm_spec import GroupedGemm, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import BYTES, is_aligned
from loka.numerics.enums import Scaling

_TITLES = {
    "layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "relu": "ReLU", "silu": "SiLU", "sigmoid": "sigmoid",
    "hardswish": "Hard Swish", "gelu": "GELU",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Values that follow from a product's shape and tiling."""

    across: int  # tiles per row of the result
    aligned: bool  # operands are read through descriptors
    descriptors: tuple[str, ...]  # parameters and results that the kernel takes as descriptors
    offsets: bool  # a matrix is written through pointers
    rows: bool  # the epilogue needs row indices although operands are read through descriptors


@dataclass(frozen=True, slots=True)
class Piece:
    """One accumulator of a tile."""

    end: str  # suffix of its names
    first: int  # first column
    masked: bool  # it extends beyond the last column
    columns: bool  # the epilogue needs its column indices


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """One product of a group."""

    end: str  # suffix of its names
    n: int
    k: int
    across: int  # tiles per row of the result
    aligned: bool  # operands are read through descriptors
    masked: bool  # the last tile of a row extends beyond the last column

    @property
    def form(self) -> str:
        """Suffix of its operands' names in the kernel."""
        return "desc" if self.aligned else "ptr"


def gemm_values(spec: TiledGemm, tiling: Tiling) -> KernelValues:
    """Template values of a product with its epilogue. Raises InputError where the epilogue needs other tiles."""
    shape = _layout(spec, tiling)
    return KernelValues(
        family="gemm/epilogue_gemm",
        spec=spec,
        launch=tiling,
        title=_title(spec),
        shapes=_shapes(spec),
        numbers={"shape": shape, "pieces": _pieces(spec, tiling, shape)},
    )


def grouped_gemm_values(spec: GroupedGemm, tiling: Tiling) -> KernelValues:
    """Template values of products of several shapes in one launch."""
    ends = endings(spec.count)
    products = [
        GroupedProduct(end, n, k, -(-n // tiling.columns), is_aligned(k, spec.operands), masked=n % tiling.columns != 0)
        for end, (n, k) in zip(ends, spec.shapes, strict=True)
    ]
    shapes: dict[str, str] = {}
    for p in products:
        shapes |= {f"a{p.end}": f"(M{p.end}, {p.k})", f"b{p.end}": f"({p.n}, {p.k})"}
        shapes |= {f"scale_a{p.end}": f"(M{p.end}, 1)", f"scale_b{p.end}": f"({p.n}, 1)"}
        shapes[f"out{p.end}"] = f"(M{p.end}, {p.n})"
    return KernelValues(
        family="gemm/grouped_gemm",
        spec=spec,
        launch=tiling,
        title=f"{spec.count} {_operands(spec)} products -> {spec.out}",
        shapes=shapes,
        numbers={"products": products, "ends": ends},
    )


def _layout(spec: TiledGemm, tiling: Tiling) -> TileLayout:
    """Layout of a tile. 32-bit results are written without a descriptor, as a tile of them fills shared memory."""
    e = spec.epilogue
    if e.norm == "block_norm" and tiling.columns != e.block:
        raise InputError(f"a tile of {tiling.columns} columns is not a block of {e.block}")
    aligned = is_aligned(spec.k, spec.operands)
    stored, kept = BYTES[e.out] < 4 and is_aligned(spec.n, e.out), is_aligned(spec.n, "bfloat16")
    by_descriptors = {"a": aligned, "b": aligned, "out": stored, "values": stored, "product": kept}
    offsets = not stored or (e.keep and not kept)
    rowwise = spec.operands == "e4m3" and spec.scaling_a is Scaling.ROWWISE
    return TileLayout(
        across=1 if e.whole_rows else -(-spec.n // tiling.columns),
        aligned=aligned,
        descriptors=tuple(name for name in spec.parameters + spec.results if by_descriptors.get(name)),
        offsets=offsets,
        rows=aligned and (rowwise or e.quantize or bool(spec.statistics) or offsets),
    )


def _pieces(spec: TiledGemm, tiling: Tiling, shape: TileLayout) -> list[Piece]:
    """The accumulators of a tile, from left to right."""
    e = spec.epilogue
    count = -(-spec.n // tiling.columns) if e.whole_rows else 1
    rowwise = spec.operands == "e4m3" and spec.scaling_b is Scaling.ROWWISE
    vectors = rowwise or e.add or e.weight or e.bias or shape.offsets
    found = []
    for index, end in enumerate(endings(count)):
        masked = index == count - 1 and spec.n % tiling.columns != 0
        cut = masked and (e.norm == "layer_norm" or (e.quantize and e.activation == "sigmoid"))
        found.append(Piece(end, index * tiling.columns, masked, columns=vectors or cut))
    return found


def _title(spec: TiledGemm) -> str:
    """The operation in words."""
    e = spec.epilogue
    steps = [f"{_operands(spec)} product"]
    if e.add:
        steps.append("addition")
    if e.norm == "block_norm":
        steps.append(f"RMSNorm over blocks of {e.block} (eps {e.eps})")
    elif e.norm is not None:
        steps.append(f"{_TITLES[e.norm]} (eps {e.eps})")
    if e.activation is not None:
        steps.append(_TITLES[e.activation])
    return " -> ".join([*steps, "e4m3 rows" if e.quantize else e.out])


def _operands(spec: TiledGemm | GroupedGemm) -> str:
    """`bfloat16`, or `e4m3 (precise)`."""
    return spec.operands if spec.operands != "e4m3" else f"e4m3 ({spec.accumulation.value})"


def _shapes(spec: TiledGemm) -> dict[str, str]:
    n, e = spec.n, spec.epilogue
    shapes = dict.fromkeys(("out", "values", "product"), f"(M, {n})") | dict.fromkeys(
        ("add", "weight", "bias"), f"({n},)"
    )
    shapes |= {"a": f"(M, {spec.k})", "b": f"({n}, {spec.k})", "scale": "(M, 1)", "scale_max": "(P,)", "mean": "(M,)"}
    shapes["scale_a"] = "(M, 1)" if spec.scaling_a is Scaling.ROWWISE else "(1, 1)"
    shapes["scale_b"] = f"({n}, 1)" if spec.scaling_b is Scaling.ROWWISE else "(1, 1)"
    return shapes | {"rstd": f"(M, {n // e.block})" if e.norm == "block_norm" else "(M,)"}
