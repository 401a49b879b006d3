"""Forwards in canonical form, in which patterns are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka.graph.canonical.kernel_statements import kernel_statements
from loka.graph.canonical.lowering import lowered
from loka.graph.canonical.nodes import Value
from loka.graph.canonical.recording import Run
from loka.graph.canonical.splicing import spliced
from loka.graph.canonical.views import CannotEmitError
from loka.graph.expression import locals_in
from loka.graph.ir import ForwardIR, Shape
from loka.graph.sites.weights import Index


def canonical_forward(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    as_written: frozenset[str] = frozenset(),
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward in canonical form, and the shapes of its locals; as it was traced where it has no such form.

    `shapes` are those of the locals as traced, `runs` what `recorded` gives, `names` the expressions of Parameters and
    buffers by name, `sites` as in `with_site_calls`. `as_written` are targets of statements that stay as they are. It
    computes the same up to rounding.
    """
    targets = [step.target for step in forward.statements if step.target != "_"]
    if not runs or len(set(targets)) < len(targets):
        return forward, shapes
    try:
        return _canonical(forward, shapes, runs, names, sites, as_written)
    except CannotEmitError:
        return forward, shapes


def _canonical(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    as_written: frozenset[str],
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    graph = lowered(forward.statements, runs, names, sites, as_written)
    by_target = {step.target: graph.made[place] for place, step in enumerate(forward.statements)}
    read = locals_in(forward.result)
    values: dict[str, Value] = {name: value for name in read if (value := by_target.get(name)) is not None}
    traced = forward.statements
    made = kernel_statements(traced, forward.result, list(runs[0].arguments), graph, values)
    statements = tuple(made.statements)
    found = replace(forward, statements=statements, traced=() if statements == traced else traced)
    return found, {**shapes, **made.shapes}


def is_canonical(forward: ForwardIR) -> bool:
    """True if statements stand for others."""
    return bool(forward.traced)


def with_traced_relus(forward: ForwardIR) -> ForwardIR:
    """The forward with each ReLU that is written otherwise as it was traced: their gradients at 0 may differ."""
    traced = {step.target: step for step in forward.traced}
    steps = enumerate(forward.statements)
    other = {place for place, step in steps if step.op == "relu" and traced.get(step.target, step) != step}
    every = frozenset(range(len(forward.statements)))
    return spliced(forward, every - other) if other else forward
