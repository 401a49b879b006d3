"""Forwards in canonical form, in which patterns are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from loka.graph.canonical.kernel_statements import kernel_statements
from loka.graph.canonical.lowering import Lowered, lowered
from loka.graph.canonical.nodes import Value
from loka.graph.canonical.recording import Run
from loka.graph.canonical.splicing import spliced
from loka.graph.canonical.views import CannotEmitError
from loka.graph.expression import Ref, local, locals_in
from loka.graph.ir import ForwardIR, Shape, Statement
from loka.graph.sites.weights import Index
from loka.graph.trace.printer import variable


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
    traced = _with_changes_named(forward.statements, graph, runs[0].arguments)
    made = kernel_statements(traced, forward.result, list(runs[0].arguments), graph, values)
    statements = tuple(made.statements)
    found = replace(forward, statements=statements, traced=() if statements == traced else traced)
    return found, {**shapes, **made.shapes}


def _with_changes_named(
    statements: Sequence[Statement], graph: Lowered, arguments: Iterable[str]
) -> tuple[Statement, ...]:
    """The statements, where what changes in place has a name of its own from then on; the graph reads these, too."""
    made: list[Statement] = []
    taken = {*arguments, *(step.target for step in statements)}
    latest: dict[Value, str] = {}
    for place, step in enumerate(statements):
        read, value = graph.read[place], graph.made[place]
        now = {local(name): local(latest.get(each, name)) for name, each in read.items() if name in graph.changed}
        graph.read[place] = {now.get(local(name), local(name)).text: each for name, each in read.items()}
        step = step.reads(partial(_now, now))
        if place in graph.changes and value is not None:
            step = replace(step, target=variable(step.op, taken)) if step.target == "_" else step
            latest[value] = step.target
        made.append(step)
    return tuple(made)


def _now(names: Mapping[Ref, Ref], ref: Ref) -> Ref:
    return names.get(ref, ref)


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
