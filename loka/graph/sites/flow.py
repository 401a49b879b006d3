"""What the products of sites become: which go into which, and the modules that hold what stands around each.

Only operations that kernels may fuse count: of norms, activations, gates and sums, however a model writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from loka.graph.patterns.norm import BATCH_NORM, TORCH_NORMS
from loka.graph.sites.merge_calls import MeasuredCall
from loka.graph.sites.neighbours import operations_after, operations_before
from loka.graph.sites.operations import Call, Operation, reached
from loka.graph.sites.site import GemmKind

# None of these mixes rows, as a BatchNorm does.
NORM_OPERATIONS = frozenset(
    (
        *(*TORCH_NORMS, "group_norm", "mean", "var", "var_mean", "std", "std_mean", "pow", "square"),
        *("rsqrt", "norm", "linalg_vector_norm", "linalg_norm"),
    )
)
ACTIVATIONS = frozenset(
    (
        *("relu", "relu6", "silu", "gelu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu"),
        *("elu", "selu", "celu", "softplus", "softsign", "logsigmoid", "mish"),
    )
)
_ACTIVATIONS = ACTIVATIONS | {"erf", "exp", "threshold", "where", "maximum", "max"}  # and what they are written with
_OTHERS = frozenset(
    (
        *("add", "sub", "mul", "div", "addcmul", "addcdiv", "neg", "reciprocal", "sqrt", "getitem"),
        *("gt", "ge", "zeros_like", "zeros", "new_zeros", "alias", "contiguous", "clone"),
        *("unsqueeze", "squeeze", "t", "T", "to", "type_as", "float", "half", "bfloat16"),
    )
)
_MOVED = frozenset(
    (
        *("transpose", "t", "T", "mT", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "einsum"),
        *("alias", "contiguous", "clone"),
    )
)
_PARTS = frozenset(("split", "split_with_sizes", "tensor_split", "chunk", "getitem", "narrow", "slice"))
_LIFTS = frozenset(("unsqueeze", "expand", "alias"))
_FLAT = frozenset(("flatten", "view", "reshape", "unflatten"))
ELEMENTWISE = frozenset(("add", "sub", "mul"))
_AROUND = NORM_OPERATIONS | _ACTIVATIONS | {BATCH_NORM, "dropout"}  # what makes a region around a GEMM
_FUSED = _AROUND | _OTHERS


@dataclass(frozen=True, slots=True)
class Flow:
    """What stands around the sites of a model, by their names."""

    # Pairs of sites that are called once: only the second multiplies what the first's product becomes.
    into: tuple[tuple[str, str], ...] = ()
    between: tuple[tuple[str, str], ...] = ()  # pairs: the norm before the second reads the first's product alone
    # The modules that hold each with parts of the norm before it, and with norms and activations after it.
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # those that compute what follows it alone
    # The modules that compute the norm right before each, and the norm, activation, sum or product right after it.
    near: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The module that joins it, the one that holds this and the norm after it, and the others that take part in that.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Of each mixing layer: x^T @ rank, x @ that, and what may be weighted sums.
    mixing: tuple[tuple[str, ...], ...] = ()
    dots: tuple[str, ...] = ()  # products x @ x^T, of no mixing layer
    operations: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by module whose own forward has them

    def around(self, fused: Collection[str]) -> Flow:
        """The flow in which these sites alone have neighbours; a norm between two of them is of the first."""
        second = {after for name, after in self.between if name in fused}
        return replace(
            self,
            before={name: self.before[name] for name in self.before if name in fused and name not in second},
            after={name: self.after[name] for name in self.after if name in fused},
            beside={name: self.beside[name] for name in self.beside if name in fused},
            near={name: self.near[name] for name in self.near if name in fused},
        )


def flow_of(sites: Mapping[str, Sequence[MeasuredCall]], outputs: Iterable[Operation] = ()) -> Flow:
    """The flow between sites, from the calls of each in a training forward, and the results of that."""
    readers: dict[int, list[str]] = defaultdict(list)
    for name, calls in sites.items():
        for measured in calls:
            readers[id(_ends(measured.call).source)].append(name)
    once = {name: calls[0].call for name, calls in sites.items() if len(calls) == 1}
    pairs = ((name, readers[id_]) for name, call in once.items() for id_ in _reached(_ends(call).product, readers))
    into = tuple((name, names[0]) for name, names in pairs if len(names) == 1 and names[0] in once)
    follows: dict[Operation, str] = {}  # the site that each operation follows
    between: list[tuple[str, str]] = []
    before: dict[str, tuple[str, ...]] = {}
    after: dict[str, tuple[str, ...]] = {}
    beside: dict[str, tuple[str, ...]] = {}
    near: dict[str, tuple[str, ...]] = {}
    named = [(name, each.call) for name, found in sites.items() for each in found]
    for name, call in named:
        ends, inside = _ends(call), call.module or call.owner
        following = _after(ends.product)
        follows.update(dict.fromkeys(following, name))
        if holders := _holders(inside, following):
            after[name] = (*after.get(name, ()), *holders)
            beside[name] = (*beside.get(name, ()), *_owners(_following(ends.product, following)))
        first = next(iter(operations_before(ends.source)), None)
        last = next(iter(operations_after(ends.product)), None)
        if first is not None and first.op in NORM_OPERATIONS and len(first.children) == 1:
            near[name] = (*near.get(name, ()), first.owner)
        if last is not None and last.op in _AROUND | ELEMENTWISE:
            near[name] = (*near.get(name, ()), last.owner)
    for name, call in named:
        ends = _ends(call)
        normed = set[Operation]() if ends.source is None else _before(ends.source, ends.reader)
        if holders := _holders(call.module or call.owner, normed):
            before[name] = (*before.get(name, ()), *holders)
            norms = (each for each in normed if each.op in NORM_OPERATIONS and each in follows)
            between += [(first, name) for first in sorted({follows[each] for each in norms})]
    joined = {name: found for name, call in once.items() if (found := _joined(call.result)) is not None}
    single = {name: calls[0] for name, calls in sites.items() if len(calls) == 1}
    products = [(name, each.call) for name, calls in sites.items() for each in calls if each.call.weight is None]
    mixing = tuple(_mixing(single, products))
    mixed = {name for layer in mixing for name in layer}
    results = (*outputs, *(each.call.result for calls in sites.values() for each in calls))
    return Flow(
        into=into,
        between=tuple(between),
        before=before,
        after=after,
        beside=beside,
        near=near,
        joined=joined,
        mixing=mixing,
        dots=tuple(dict.fromkeys(name for name, each in products if name not in mixed and _is_with_itself(each))),
        operations=_by_owner(results),
    )


def _by_owner(results: Iterable[Operation]) -> dict[str, frozenset[str]]:
    """The names of the operations that lead to results, by the module whose own forward has them."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in reached(results, lambda node: (parent for parent in node.parents if not parent.constant)):
        found[each.owner].add(each.op)
    return {owner: frozenset(names) for owner, names in found.items()}


def _holders(inside: str, nodes: Iterable[Operation]) -> tuple[str, ...]:
    """The smallest modules that hold one and each of the norms and activations among some operations."""
    return tuple(dict.fromkeys(common_module((inside, each)) for each in _owners(nodes, _AROUND)))


def _owners(nodes: Iterable[Operation], ops: Collection[str] = NORM_OPERATIONS | _ACTIVATIONS) -> tuple[str, ...]:
    """The modules that compute the norms and activations among some operations, those of these names."""
    return tuple(sorted({node.owner for node in nodes if node.op in ops}))


def _following(product: Operation, alone: Collection[Operation]) -> set[Operation]:
    """Of the operations that read nothing but a product, those before something else reads on, as a residual does."""
    return reached([product], lambda here: here.children if set(here.children) <= set(alone) else ()) - {product}


def _joined(product: Operation) -> tuple[str, ...] | None:
    """The module that concatenates a product, or adds to it; the one around it and the norm after it; those between."""
    node, joins = product, list[Operation]()
    while node.children:
        norm = next((child for child in node.children if child.op in NORM_OPERATIONS), None)
        if norm is not None and joins:
            owners = tuple(dict.fromkeys(each.owner for each in (*joins, norm)))
            return joins[0].owner, common_module(owners), *owners[1:]
        if len(node.children) > 1:
            return None
        (node,) = node.children
        if (
            len(node.parents) > 1
            and node.op in ("cat", "hstack", "add")
            and not any(each.constant for each in node.parents)
        ):
            joins.append(node)
        elif not node.view and node.op != "add":
            return None
    return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """A GEMM without the views that its form asks for.

    These are the transposes of `(W @ x.t()).t()`, or of a convolution of size 1, and x.unsqueeze(0) of a bmm.
    """

    source: Operation | None  # of the input
    reader: Operation  # what reads that: the GEMM or the transpose before it
    product: Operation


def _ends(call: Call) -> _Ends:
    source, reader, product = call.source, call.result, call.result
    while (
        call.weight and source is not None and source.op in _LIFTS and len(source.parents) == len(source.children) == 1
    ):
        source, reader = source.parents[0], source
    parents = call.result.parents
    from_the_left = (len(parents) == 2 and parents[0].constant) or call.kind is GemmKind.CONVOLUTION
    if call.weight is None or not from_the_left or source is None:
        return _Ends(source, reader, product)
    if source.op in _MOVED and len(source.parents) == 1:
        source, reader = source.parents[0], source
    if len(product.children) == 1 and product.children[0].op in _MOVED:
        product = product.children[0]
    return _Ends(source, reader, product)


def _mixing(sites: Mapping[str, MeasuredCall], products: Iterable[tuple[str, Call]]) -> Iterator[tuple[str, ...]]:
    """The sites of mixing layers, wherever they are written: x^T @ rank, x @ that, and products alike the first.

    `products` are calls without weights: those of several layers in a loop have one name.

    The latter multiply as many rows of x as long by another weight: among them are the weighted sums of x.
    """
    weighted = {name: each for name, each in sites.items() if each.call.weight is not None and each.call.source}
    made = {each.call.result: name for name, each in weighted.items()}
    read = {name: _unmoved(each.call.source) for name, each in weighted.items() if each.call.source is not None}
    for name, product in products:
        parts = [_unmoved(part) for part in product.result.parents]
        if len(parts) != 2:
            continue
        for x, inner in (parts, parts[::-1]):
            rank = made.get(_unmoved(inner, _MOVED | _PARTS))  # or a part of a product with both matrices
            if rank is not None and read[rank] is x:
                sizes = weighted[rank].rows, weighted[rank].k
                alike = (other for other, found in weighted.items() if (found.rows, found.k) == sizes)
                yield rank, name, *(other for other in alike if other != rank and read[other] is x)


def _is_with_itself(product: Call) -> bool:
    """True for the product of a tensor with itself, transposed."""
    parents = product.result.parents
    return len(parents) == 2 and _unmoved(parents[0]) is _unmoved(parents[1])


def _unmoved(node: Operation, moved: Collection[str] = _MOVED) -> Operation:
    """The tensor whose axes a view moves; with other operations in `moved`, that these take a part of."""
    while node.op in moved and len(node.parents) == 1 and not node.gemm:
        node = node.parents[0]
    return node


def _reached(product: Operation, sources: Collection[int]) -> tuple[int, ...]:
    """Ids of the first nodes that GEMMs read on the way from a product; `sources` are all such.

    The way is through what reads nothing but the product, perhaps times something else, and through sums and products
    with others. It ends where something else reads on, as a residual stream does: its blocks stay apart, so that each
    can be a unit of FSDP.
    """
    found: dict[int, None] = {}
    fuses = _is_fused_or_flat if product.folded else _is_fused
    alone = _after(product, fuses)
    mixed = {product}  # sums and products of it
    seen, waiting = {product}, [product]
    while waiting:
        here = waiting.pop()
        if id(here) in sources:
            found[id(here)] = None
            continue
        if len(here.children) > 1 and not all(child in alone for child in here.children):
            continue
        fused = [child for child in here.children if fuses(child)]
        mixed.update(child for child in fused if here in mixed and child.op in _OTHERS | _FLAT)
        mixed.update(child for child in fused if here in alone and child.op == "mul")
        ahead = [child for child in fused if child not in seen and (child in alone or child in mixed)]
        seen.update(ahead)
        waiting += ahead
    return tuple(found)


def _before(source: Operation, gemm: Operation) -> set[Operation]:
    """The operations of a norm before a GEMM whose results nothing else reads, up to an activation or a residual."""
    inside: set[Operation] = set()
    waiting = [source]
    while waiting:
        here = waiting.pop()
        alone = all(child is gemm or child in inside for child in here.children)
        residual = here.op == "add" and sum(not parent.constant for parent in here.parents) > 1
        if here not in inside and alone and _is_fused(here) and here.op not in _ACTIVATIONS and not residual:
            inside.add(here)
            waiting += here.parents
    return inside


def _after(product: Operation, fuses: Callable[[Operation], bool] | None = None) -> set[Operation]:
    """The operations after a GEMM that read nothing but its product, and constants."""
    inside, fuses = {product}, fuses or _is_fused
    waiting = list(product.children)
    while waiting:
        here = waiting.pop(0)
        own = [parent for parent in here.parents if not parent.constant]
        if here not in inside and fuses(here) and all(parent in inside for parent in own):
            inside.add(here)
            waiting += here.children
    return inside - {product}


def _is_fused(node: Operation) -> bool:
    return (node.op in _FUSED or node.rows) and not node.gemm and not node.constant


def _is_fused_or_flat(node: Operation) -> bool:
    """After a product whose columns are several dimensions, what makes rows of them changes nothing."""
    return _is_fused(node) or (node.op in _FLAT and not node.constant)


def common_module(names: Iterable[str]) -> str:
    """The innermost module around all of these."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(_first(parts))


def _first(parts: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from (same[0] for same in takewhile(lambda each: len(set(each)) == 1, parts))
