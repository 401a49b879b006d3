"""Workload of a site's step for each execution option: the parts (`parts`) that are timed.

A site's step has its GEMMs, the kernels that make their operands, and the norms and activations around it, forward and
backward:

- native: forward, the norm and activation before, in BF16, and the GEMM; backward, the gradient of those after, in
  BF16, and the GEMMs; fused, the norms and activations are rendered kernels around the library's GEMM;
- with a chain's recipe, fused with its neighbours: forward, the norm and activation before write FP8, and the weight is
  quantized; backward, the gradient of those after is written in FP8; it, the input and the weight are transposed;
- with a chain's recipe, not fused: the same, with a quantizer each for the input and the output gradient;
- with static scales in a chain: the same passes, which take longer than those that compute rowwise scales
  (`STATIC_SCALES`, and `STATIC_SCALES_TILES` next to a BlockNorm, whose kernels write both copies of a tile);
- with any other recipe, and if some of its GEMMs stay in BF16: each GEMM quantizes both of its operands separately,
  from a transposed copy where necessary. Such a site is no chain.

Norms and activations of a site that is not fused are compiled by torch (`COMPILED`), whatever dtype its GEMMs run in.
So native GEMMs have two times, compiled and fused, and what fusion gains is no gain of FP8. What stands before a site
counts as rendered, too, where the kernel is that of the site before.

A norm between two linears is counted once: its forward with the linear that reads it, its gradient with the linear
before it. Sums in between (products, residuals, biases) cost the same bytes in each of these, and are left out.
Transposed copies for other recipes are counted as a copy and a quantizer; the compiler may fuse both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile

from loka.graph.patterns.norm import BATCH_NORM
from loka.graph.sites.flow import ELEMENTWISE
from loka.graph.sites.site import Site
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.gemm.catalogue import gemm_sizes
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Accumulation, Format, Gemm, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe, Recipe
from loka.plan.plan import NATIVE

RENDERED = "rendered"
COMPILED = "compiled"  # by torch.compile; not recorded, derived from rendered kernels
# Rendered, with static scales; not recorded, derived from rendered kernels.
STATIC_SCALES, STATIC_SCALES_TILES = "static", "static-tiles"
DROPOUT = "dropout"
TIMES = "times"  # what a norm gives is multiplied by a matrix, whose bytes are the same in each kernel
DTYPE = "bfloat16"  # of activations: the model's own, or autocast's
_GEMMS = frozenset({"linear", "matmul", "mm", "addmm", "einsum", "bmm"})


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The operations around a site that a chain's kernels could fuse: "layer_norm silu", "" for none."""

    before: str = ""  # makes the input
    after: str = ""  # is applied to the product
    first: bool = True  # no linear before `before`, so its gradient is counted here
    last: bool = True  # no linear reads the result of `after`, so its forward is counted here
    takes_before: bool = True  # the site's own kernel can fuse it; otherwise only in a chain with the linear before
    takes_after: bool = True  # the kernel of its gradient can write FP8
    made_before: bool = False  # by LoKA's kernels of the site before, though none takes this one along

    @property
    def any(self) -> bool:
        """True if there is anything to fuse."""
        return bool(self.before or self.after)

    def in_chain(self, traced: Surroundings) -> Surroundings:
        """The same with the results of tracing; operations that a chain does not fuse are still counted."""
        return Surroundings(
            before=traced.before or self.before,
            after=traced.after or self.after,
            first=traced.first and self.first,
            last=traced.last and self.last,
            takes_before=traced.first and bool(traced.before),
            takes_after=bool(traced.after),
        )


@dataclass(frozen=True, slots=True)
class SiteSizes:
    """A site's y = x @ weight.T: x of (m, k), weight of (n, k), m of one call at the policy's batch size."""

    m: int
    k: int
    n: int

    @property
    def fits(self) -> bool:
        """True if rendered kernels support both widths."""
        return max(self.k, self.n) <= LARGEST_WIDTH


@dataclass(frozen=True, slots=True)
class Workload:
    """The parts of one step besides its GEMMs, in execution order."""

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class TracedNeighbours:
    """Results of tracing for sites that were to be fused with their neighbours."""

    chains: tuple[tuple[str, ...], ...] = ()  # the names of the sites of each chain
    around: Mapping[str, Surroundings] = field(default_factory=dict)  # by site in a chain
    alone: frozenset[str] = frozenset()  # the others: no kernel fuses anything around them


def surroundings_of(site: Site) -> Surroundings:
    """The model's own operations around a site, before tracing."""
    before, beyond = _around(tuple(reversed(site.fed_by)), backwards=True)
    after, behind = _around(site.followed_by, backwards=False)
    takes_before = before in NORMS and before != BATCH_NORM
    return Surroundings(before, after, beyond not in _GEMMS, behind not in _GEMMS, takes_before)


def _around(ops: tuple[str, ...], backwards: bool) -> tuple[str, str]:
    """[norm] [activation] [dropout] next to a site, in words, and the operation beyond; `ops` as in the forward."""
    near = tuple(reversed(ops)) if backwards else ops
    skipped = tuple(takewhile(lambda op: op in ELEMENTWISE, near))
    near = near[len(skipped) :]
    found: list[str] = []
    kinds_in_order = (NORMS, ACTIVATIONS, (DROPOUT,))
    for kinds in reversed(kinds_in_order) if backwards else kinds_in_order:
        if near and near[0] in kinds:
            found.append(near[0])
            near = near[1:]
    beyond = next(dropwhile(lambda op: op in ELEMENTWISE, near), "")
    found = [] if found == [DROPOUT] else found  # kernels take it with something else
    return " ".join(reversed(found) if backwards else found), beyond


def gemm_part(
    gemm: Gemm, sizes: SiteSizes, kernel: str, pair: OperandPair | None, accumulation: Accumulation | None
) -> Part:
    """The GEMM itself on a kernel; `pair` and `accumulation` are None for the native one."""
    found = gemm_sizes(gemm, sizes.m, sizes.k, sizes.n)
    recipe = ""
    if pair is not None:
        how = accumulation or Accumulation.PRECISE
        recipe = f"{_written(pair[0])}, {_written(pair[1])}, {how.value}"
    return Part(PartKind.GEMM, kernel, found.rows, found.columns, found.contraction, DTYPE, recipe)


def native_part(gemm: Gemm, sizes: SiteSizes) -> Part:
    """The native GEMM."""
    return gemm_part(gemm, sizes, NATIVE, None, None)


def workload_of(sizes: SiteSizes, recipe: Recipe, around: Surroundings, fused: bool, joined: bool) -> Workload:
    """The parts besides the GEMMs.

    `fused`: LoKA's kernels include the neighbours, those of a chain or around native GEMMs; otherwise torch compiles
    them. `joined`: the previous site is in the same chain, so that its last kernel makes this one's input.
    """
    if sizes.fits and recipe.is_chain:
        workload = _chained(sizes, recipe, around, fused, joined)
        return _under_static_scales(workload, around) if recipe.is_static else workload
    return _plain(sizes, recipe, around, RENDERED if fused and sizes.fits and not recipe.fp8 else COMPILED)


def _under_static_scales(workload: Workload, around: Surroundings) -> Workload:
    """The passes that write FP8 or transpose it, with static scales; the others unchanged."""
    kernel = STATIC_SCALES_TILES if "block_norm" in f"{around.before} {around.after}" else STATIC_SCALES

    def known(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(part if part.recipe == DTYPE else replace(part, kernel=kernel) for part in parts)

    return Workload(known(workload.forward), known(workload.backward))


def _chained(sizes: SiteSizes, recipe: Recipe, around: Surroundings, fused: bool, joined: bool) -> Workload:
    m, k, n = sizes.m, sizes.k, sizes.n
    forward, backward = [], []
    rows = "e4m3 rowwise"  # a static scale is written in one pass as well
    weight = "e4m3 tensorwise" if recipe.is_static else rows
    kernel = RENDERED if fused else COMPILED
    of_after = kernel if around.takes_after else COMPILED
    if fused and around.before and (joined or around.takes_before):
        forward.append(_part(PartKind.FORWARD, m, k, rows, around.before))
    else:
        forward += _native(PartKind.FORWARD, m, k, around.before, RENDERED if around.made_before else kernel)
        forward.append(_part(PartKind.QUANTIZE, m, k, rows))
    forward.append(_part(PartKind.QUANTIZE, n, k, weight))
    forward += _native(PartKind.FORWARD, m, n, around.after, of_after, around.last)
    if fused and around.after and around.takes_after:
        backward.append(_part(PartKind.BACKWARD, m, n, rows, around.after))
    else:
        backward += _native(PartKind.BACKWARD, m, n, around.after, of_after)
        backward.append(_part(PartKind.QUANTIZE, m, n, rows))
    if not recipe.has_dgrad and not recipe.has_wgrad:
        return Workload(tuple(forward), ())
    if recipe.has_wgrad:
        backward += [_transposed(m, n), _transposed(m, k)]
    if recipe.has_dgrad:
        backward.append(_transposed(n, k))
        backward += _native(PartKind.BACKWARD, m, k, around.before, kernel, around.first)
    return Workload(tuple(forward), tuple(backward))


def _plain(sizes: SiteSizes, recipe: Recipe, around: Surroundings, kernel: str) -> Workload:
    """Each FP8 GEMM quantizes its own operands; norms and activations stay native, on this kind of kernel."""
    m, k, n = sizes.m, sizes.k, sizes.n
    forward = [*_native(PartKind.FORWARD, m, k, around.before, RENDERED if around.made_before else kernel)]
    of_after = kernel if around.takes_after else COMPILED
    backward = [*_native(PartKind.BACKWARD, m, n, around.after, of_after)]
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
    if fprop is not None:
        forward += [_quantized(fprop[0], m, k), _quantized(fprop[1], n, k)]
    if dgrad is not None:
        in_chain = recipe.keeps_wgrad and not around.any
        weight = (_transposed(n, k),) if in_chain else _across(dgrad[1], n, k)
        backward += [_quantized(dgrad[0], m, n), *weight]
    if wgrad is not None:
        backward += [*_across(wgrad[0], m, n), *_across(wgrad[1], m, k)]
    forward += _native(PartKind.FORWARD, m, n, around.after, of_after, around.last)
    if not recipe.has_dgrad and not recipe.has_wgrad:
        return Workload(tuple(forward), ())
    if recipe.has_dgrad:
        backward += _native(PartKind.BACKWARD, m, k, around.before, kernel, around.first)
    return Workload(tuple(forward), tuple(backward))


def _across(recipe: OperandRecipe, rows: int, columns: int) -> tuple[Part, ...]:
    """The passes that make an operand along the other dimension of a matrix: quantized or copied, then transposed."""
    if recipe.transposed:
        return (
            _part(PartKind.QUANTIZE, rows, columns, f"{recipe.format.value} rowwise"),
            _transposed(rows, columns, recipe),
        )
    return (_part(PartKind.COPY, rows, columns, DTYPE), _quantized(recipe, columns, rows))


def _quantized(recipe: OperandRecipe, rows: int, columns: int) -> Part:
    """A quantizer; one with a static scale reads its matrix once, like a rowwise one."""
    if recipe.is_static:
        return _part(PartKind.QUANTIZE, rows, columns, f"{recipe.format.value} {Scaling.ROWWISE.value}")
    return _part(PartKind.QUANTIZE, rows, columns, _written(recipe))


def _transposed(rows: int, columns: int, recipe: OperandRecipe | None = None) -> Part:
    """The transposition of an FP8 matrix (rows, columns); the copy has a single scale."""
    written = recipe.format.value if recipe is not None else Format.E4M3.value
    return _part(PartKind.REQUANTIZE_TRANSPOSE, rows, columns, f"{written} {Scaling.TENSORWISE.value}")


def _native(
    work: PartKind, rows: int, columns: int, around: str, kernel: str, counted: bool = True
) -> tuple[Part, ...]:
    """A norm and an activation in the model's dtype; nothing where there are none, or another site counts them."""
    return (_part(work, rows, columns, DTYPE, around, kernel),) if around and counted else ()


def _part(work: PartKind, rows: int, columns: int, recipe: str, around: str = "", kernel: str = RENDERED) -> Part:
    return Part(work, kernel, rows, columns, 0, DTYPE, recipe, around)


def _written(recipe: OperandRecipe) -> str:
    return f"{recipe.format.value} {recipe.scaling.value}"
