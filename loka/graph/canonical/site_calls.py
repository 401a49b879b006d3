"""The calls of sites in a traced forward: the statements that are y = x @ weight.T between two changes of view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.layout import Size, is_fixed, merged, regrouped, rows_of, size_of, translated
from loka.graph.canonical.lowering import Lowered, lowered
from loka.graph.canonical.nodes import Linear, Parameter, Value
from loka.graph.canonical.recording import Run
from loka.graph.canonical.views import CannotEmitError, viewed, weight_ref
from loka.graph.expression import PRODUCT, Arg, Call, RefKind, local, method
from loka.graph.ir import GEMMS, ForwardIR, SiteCall, Statement
from loka.graph.sites.weights import Index


@dataclass(frozen=True, slots=True)
class Called:
    """A traced forward whose statements have the calls of sites."""

    forward: ForwardIR
    sites: tuple[str, ...]
    _graph: Lowered

    def problem(self, forward: ForwardIR) -> tuple[str, str | None] | None:
        """A site without a call in a form of this forward, or with a GEMM that is none, in words; None without one.

        With it, the target of the traced statement that shows it.
        """
        called = {step.call.site for step in forward.statements if step.call is not None}
        left = {(step.target, step.form) for step in forward.statements if step.call is None}
        readers = [(step, self._read(place, step)) for place, step in enumerate(self.forward.statements)]
        for site in self.sites:
            steps = [step for step, read in readers if site in read]
            others = [step for step in steps if step.op in GEMMS and (step.target, step.form) in left]
            if site not in called or others:
                step = next(iter((*others, *steps)), None)
                unused = not others and self._calls(site)  # the form has only what the result needs
                reason = f"'{site}' makes what is not used" if unused else self._reason(site, step)
                return reason, None if step is None else step.target
        return None

    def _calls(self, site: str) -> bool:
        """True if the forward as traced calls a site."""
        return any(step.call is not None and step.call.site == site for step in self.forward.statements)

    def _reason(self, site: str, step: Statement | None) -> str:
        """Why a site has no call, with the statement that reads its weight."""
        if step is not None and step.op in GEMMS:
            return f"'{site}' goes into '{step.op}' in a form that is not y = x @ weight.T"
        if step is not None:
            return f"'{site}' goes into '{step.op}' before any GEMM, and only views are followed"
        return f"'{site}' takes part in no GEMM of the forward"

    def _read(self, place: int, step: Statement) -> set[str]:
        """The sites whose weights a statement reads, unless it makes a view of one."""
        weights, made = self._graph.weights, self._graph.made[place]
        if made is not None and made.node in weights:
            return set()
        texts = {ref.text for ref in step.operands if ref.kind is RefKind.ATTRIBUTE}
        nodes = {value.node for value in self._graph.read[place].values()}
        nodes |= {node for node in weights if isinstance(node, Parameter) and node.name in texts}
        return {step.note if step.note in self.sites else weights[node] for node in nodes if node in weights}


def with_site_calls(
    forward: ForwardIR, runs: Sequence[Run], names: Mapping[str, str], sites: Mapping[str, tuple[str, Index]]
) -> Called:
    """The forward with a call at each statement that is one product of a local with the weight of a site.

    `runs` is what `recorded` gives, `names` the expressions of Parameters and buffers by name; `sites` has the
    Parameter of each site, by name, and the index of the matrix in it.
    """
    graph = lowered(forward.statements, runs, names, sites, alone=True)
    statements = [_with_call(step, place, graph) for place, step in enumerate(forward.statements)]
    return Called(replace(forward, statements=tuple(statements)), tuple(sites), graph)


def _with_call(step: Statement, place: int, graph: Lowered) -> Statement:
    value = graph.products.get(place)
    if value is None or not isinstance(value.node, Linear):
        return step
    node, site = value.node, value.node.site
    x = next((each for each in graph.read[place].items() if each[1].node is node.x), None)
    if site is None or x is None:
        return step
    made = product_layout(node, [value])
    lead = translated(made.dims[:-1], node.rows)
    if lead is None:
        return step
    runs = len(made.shape[-1])
    k, k_size = merged(node.k), size_of(node.k, runs)
    taken = Value(node.x, (*lead, k), (*made.shape[:-1], k_size))
    matrix = Value(node.weight, (merged(node.weight_n), merged(node.weight_k)), (made.shape[-1], k_size))
    try:
        weight = weight_ref(matrix)
        bias = None if node.bias is None else weight_ref(node.bias)
        of_x, out = _view(local(x[0]), x[1], taken), _view(PRODUCT, made, value)
    except CannotEmitError:
        return step
    if weight is None or of_x is None or out is None or (node.bias is not None and bias is None):
        return step
    if isinstance(out, Call) and place in graph.contiguous:  # as torch's own result is: a view may read it
        out = method(out, "contiguous")
    of_weight: Arg = method(weight[0], "t") if weight[1] else weight[0]
    return replace(step, call=SiteCall(site, of_x, of_weight, None if bias is None else bias[0], out))


def _view(tensor: Arg, first: Value, wanted: Value) -> Arg:
    """A tensor in another layout; None where that is no view of it."""
    for each in (first, wanted):
        if any(size_of(dim, len(size)) != size for dim, size in zip(each.dims, each.shape, strict=True)):
            return None  # broadcast
    return viewed(tensor, first, wanted)


def product_layout(node: Linear, candidates: Sequence[Value]) -> Value:
    """The first candidate that shows the rows of a product with all its columns; the rows as they are without one."""
    own: list[Size] = list(node.shape)

    def fits(each: Value) -> bool:
        if not all(each.dims[:-1]):  # of one element, or broadcast
            return False
        last = rows_of(own[-1:])
        columns = each.dims[-1:] == last and each.shape[-1:] == (own[-1],) and is_fixed(own[-1])
        return columns and regrouped([piece for dim in rows_of(own) for piece in dim], each.shape) == each.dims

    return next((each for each in candidates if fits(each)), Value(node, rows_of(own), tuple(own)))
