"""Forwards in canonical form: the one form that patterns, mods and generated code know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.kernel_statements import kernel_statements
from loka.graph.canonical.lowering import Lowered, lowered
from loka.graph.canonical.nodes import Linear, Parameter, Value
from loka.graph.canonical.recording import Run
from loka.graph.expression import RefKind, locals_in
from loka.graph.ir import GEMMS, ForwardIR, Shape, Statement
from loka.graph.sites.weights import Index


@dataclass(frozen=True, slots=True)
class Canonical:
    """A forward in canonical form, with the shapes of its locals."""

    forward: ForwardIR
    shapes: Mapping[str, Shape]
    _traced: tuple[Statement, ...]
    _sites: tuple[str, ...]
    _graph: Lowered

    def problem(self) -> tuple[str, str | None] | None:
        """A site without a call, or with a GEMM that is none, in words; None without one.

        With it, the target of the traced statement that shows it.
        """
        called = {step.call.site for step in self.forward.statements if step.call is not None}
        left = {(step.target, step.form) for step in self.forward.statements if step.call is None}
        readers = [(step, self._read(place, step)) for place, step in enumerate(self._traced)]
        made = {value.node.site for value in self._graph.made if value is not None and isinstance(value.node, Linear)}
        for site in self._sites:
            steps = [step for step, read in readers if site in read]
            others = [step for step in steps if step.op in GEMMS and (step.target, step.form) in left]
            if site not in called or others:
                step = next(iter((*others, *steps)), None)
                unused = not others and site in made  # the form has only what the result needs
                reason = f"'{site}' makes what is not used" if unused else self._reason(site, step)
                return reason, None if step is None else step.target
        return None

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
        return {step.note if step.note in self._sites else weights[node] for node in nodes if node in weights}


def canonical_forward(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    as_written: frozenset[str] = frozenset(),
) -> Canonical:
    """A traced forward in canonical form, which computes the same up to rounding. Raises CannotEmitError.

    `shapes` are those of the locals as traced, `runs` what `recorded` gives, `names` the expressions of Parameters and
    buffers by name. `sites` has the Parameter of each site, by name, and the index of the matrix in it. `as_written`
    are targets of statements that stay as they are.
    """
    graph = lowered(forward.statements, runs, names, sites, as_written)
    by_target = {step.target: graph.made[place] for place, step in enumerate(forward.statements)}
    read = locals_in(forward.result)
    values: dict[str, Value] = {name: value for name in read if (value := by_target.get(name)) is not None}
    made = kernel_statements(forward.statements, forward.result, list(runs[0].arguments), graph, values)
    found = replace(forward, statements=tuple(made.statements))
    return Canonical(found, {**shapes, **made.shapes}, forward.statements, tuple(sites), graph)
