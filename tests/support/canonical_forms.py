"""Canonical forms of forwards that a test writes as statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from loka.graph.canonical.forwards import canonical_forward
from loka.graph.canonical.recording import out_of_place, recorded
from loka.graph.equivalence import with_forward
from loka.graph.expression import Ref, RefKind, local
from loka.graph.ir import ForwardIR, Statement
from loka.graph.sites.weights import Index
from loka.graph.trace.examples import ExampleCall, Examples
from tests.support.expressions import statement, template

Sizes = Mapping[str, tuple[int, ...]]


def statements(*lines: str) -> tuple[Statement, ...]:
    """Statements "y = add x z: {0} + {1}": target, op, operands, template; names with a dot are attributes of self.

    A line that begins with "GEMM" calls the site "w", the Parameter of that name.
    """
    made = []
    for line in lines:
        head, _, text = line.removeprefix("GEMM ").partition(": ")
        target, _, op, *names = head.split()
        refs = tuple(Ref(RefKind.ATTRIBUTE if "." in name else RefKind.LOCAL, name) for name in names)
        made.append(statement(target, op, text, refs))
    return tuple(made)


def forward_of(lines: Sequence[str], inputs: Sizes, read: Sequence[str] = ()) -> ForwardIR:
    """A forward with these statements, as it was traced; it returns the last target, and those in `read`."""
    steps = statements(*lines)
    returned = tuple(map(local, (steps[-1].target, *read)))
    return ForwardIR("", "", tuple(inputs), steps, returned if read else returned[0], (), "")


def canonical(lines: Sequence[str], inputs: Sizes, parameters: Sizes, read: Sequence[str] = ()) -> ForwardIR:
    """The canonical form of a forward with these statements.

    `inputs` are the sizes of its arguments without the batch, the first dimension. It returns the last target, and
    those in `read`.
    """
    owner = nn.Module()
    for number, (name, size) in enumerate(parameters.items()):
        owner.register_parameter(name, nn.Parameter(torch.randn(size) + number))
    forward = forward_of(lines, inputs, read)
    calls = tuple(ExampleCall(b, tuple(torch.randn(b, *size) for size in inputs.values()), {}) for b in (3, 5))

    def copied() -> nn.Module:
        made = nn.Module()
        made._parameters.update(owner._parameters)
        return made

    runs = recorded(forward, Examples("", calls), copied)
    shapes = {name: (None, *size) for name, size in inputs.items()}
    names = {name: f"self.{name}" for name in parameters}
    sites: dict[str, tuple[str, Index]] = {"w": ("w", ())} if any(line.startswith("GEMM") for line in lines) else {}
    assert out_of_place(forward, runs) is None
    return canonical_forward(forward, shapes, runs, names, sites).forward


def texts(forward: ForwardIR) -> list[str]:
    """The text of each statement."""
    return [step.text() for step in forward.statements]


def templates(forward: ForwardIR) -> list[str]:
    """The template of each statement."""
    return [template(step) for step in forward.statements]


def assert_same(forward: ForwardIR, lines: Sequence[str], inputs: Sizes, parameters: Sizes) -> None:
    """Fails unless a canonical form has the results and gradients of what was traced."""
    owner = nn.Module()
    for name, size in parameters.items():
        owner.register_parameter(name, nn.Parameter(torch.randn(size)))
    drawn = {name: torch.randn(4, *size) for name, size in inputs.items()}
    found = []
    for each in (forward, forward_of(lines, inputs)):
        given = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
        made = with_forward(owner, each)(*(tensor * 1.0 for tensor in given.values()))
        results: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)
        wanted = [*given.values(), *owner.parameters()]
        loss = sum((result.square().sum() for result in results), torch.zeros(()))
        found.append((results, torch.autograd.grad(loss, wanted, allow_unused=True)))
    (ours, our_gradients), (theirs, their_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
