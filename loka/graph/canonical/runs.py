"""Canonical statements: for runs of statements that compute a known function, torch's own statement of it.

A hand-written norm of four statements, `x * torch.sigmoid(x)`, `torch.add(input=a, other=b)` and
`torch.hstack([a, b])` so become `layer_norm`, `silu`, `a + b` and `torch.cat([a, b], 1)`; `torch.addcmul(c, a, b)`
becomes a product and a sum. What a run computes is tested by evaluating it (`evaluation`), so that its spelling does
not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from loka.graph.canonical.evaluation import CASTS, PIECES, Evaluable, agree, drawn, evaluable, evaluated
from loka.graph.ir import Ref, RefKind, Statement
from loka.graph.patterns.norm import parse_norm
from loka.graph.trace.observed_shapes import Shape

_LONGEST = 12  # statements of a run
_BATCH = 3  # drawn for a dimension that differs between calls
_FUNCTIONAL = "torch.nn.functional"
_ACTIVATIONS = ("relu", "silu", "gelu", "sigmoid", "tanh", "softplus", "mish")
_SCALES = (1.0, 0.02, 30.0)  # of drawn inputs: where eps is nothing, and where it is all
_LEAST_EPS = 1e-18  # what is less is rounding: the norm has none, and gives NaN for a row of zeros
_ENDS = (0.0, -1.0, 1.0, 1e-30, -1e-30, 0.5, -0.5, 7.0, -7.0, 1e30, -1e30)  # where pieces of a function may begin
_PLAIN = frozenset({"{0} + {1}", "{0} * {1}"})
_NORMS = ("layer_norm", "rms_norm")
_PRODUCT_SUMS = frozenset({"addcmul"})


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a run reads: locals, and Parameters or buffers."""

    locals: tuple[Ref, ...]
    attributes: tuple[Ref, ...]


def canonical_runs(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> tuple[Statement, ...]:
    """The statements with each run that computes a known function as one or two, the first with the run in `written`.

    `shapes` are those of the locals, `attributes` those of Parameters and buffers by their expressions, `readers` the
    places of the statements that read each local. A run is as long as possible, and nothing else reads inside it.
    """
    finder = _Finder(statements, shapes, readers, attributes)
    made: list[Statement] = []
    place = 0
    while place < len(statements):
        last, found = finder.run_at(place)
        made += found or [statements[place]]
        place = last + 1
    return tuple(made)


class _Finder:
    """Finds the longest known run at a place."""

    def __init__(
        self,
        statements: Sequence[Statement],
        shapes: Mapping[str, Shape],
        readers: Mapping[str, Collection[int]],
        attributes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._statements, self._shapes, self._readers = statements, shapes, readers
        self._attributes = attributes
        self._steps = [None if step.call or step.written else evaluable(step) for step in statements]

    def run_at(self, first: int) -> tuple[int, list[Statement]]:
        """The last place of the run, and its canonical statements; none where it is canonical, or not known."""
        best: tuple[int, list[Statement]] = (first, [])
        for last in self._ends(first):
            found = self._known(first, last)
            if found:
                best = last, found
        last, found = best
        same = [step.template for step in found] == [step.template for step in self._statements[first : last + 1]]
        return (first, []) if same else best

    def _ends(self, first: int) -> Iterator[int]:
        """The places where a run that starts at `first` could end: only the value there is read outside."""
        inside: set[str] = set()
        for last in range(first, min(first + _LONGEST, len(self._statements))):
            if self._steps[last] is None:
                return
            places = range(first, last + 1)
            if all(set(self._readers.get(target, ())) <= set(places) for target in inside):
                yield last
            inside.add(self._statements[last].target)

    def _known(self, first: int, last: int) -> list[Statement]:
        """The canonical statements of a run; none where it computes something else."""
        run = self._statements[first : last + 1]
        shape = self._shapes.get(run[-1].target, ())
        inputs = self._inputs(run)
        if inputs is None or len(shape) < 2:
            return []
        steps = [step for step in self._steps[first : last + 1] if step is not None]
        found: Statement | None = None
        of_one = len(inputs.locals) == 1 and self._shapes.get(inputs.locals[0].text) == shape
        pieces = any(step.op in PIECES for step in run)
        if of_one and not inputs.attributes and (len(run) > 1 or pieces):
            found = (self._relu if pieces else self._activation)(steps, inputs.locals[0])
        if (
            of_one
            and not pieces
            and found is None
            and (len(run) > 1 or (run[0].op in (*_NORMS, "group_norm") and parse_norm(run[0]) is None))
        ):
            found = self._norm(steps, inputs, shape)
        casts = any(step.op in CASTS for step in run)  # of a sum, these may be what makes its dtype
        if len(inputs.locals) == 2 and not inputs.attributes and len(run) < 3 and not casts:
            found = self._sum_or_product(run, steps, inputs.locals, shape) or self._concatenation(steps, inputs, shape)
        if found is None and len(run) == 1 and run[0].op in _PRODUCT_SUMS and not inputs.attributes:
            return self._product_and_sum(run[0], steps, inputs.locals, shape)
        if found is None:
            return []
        return [replace(found, target=run[-1].target, note=run[-1].note, written=tuple(run))]

    def _inputs(self, run: Sequence[Statement]) -> _Inputs | None:
        """What a run reads, in order; None for a local of unknown shape, or an attribute that is no tensor."""
        inside = {step.target for step in run}
        read = (ref for step in run for ref in step.operands[: 1 if step.op == "type_as" else None])
        refs = dict.fromkeys(ref for ref in read if ref.text not in inside)
        tensors = tuple(ref for ref in refs if ref.kind is RefKind.LOCAL)
        attributes = tuple(ref for ref in refs if ref.kind is RefKind.ATTRIBUTE)
        known = all(self._shapes.get(ref.text) for ref in tensors) and all(
            r.text in self._attributes for r in attributes
        )
        return _Inputs(tensors, attributes) if known and len(tensors) <= 3 and len(attributes) <= 2 else None

    def _sizes(self, ref: Ref) -> tuple[int, ...]:
        if ref.kind is RefKind.ATTRIBUTE:
            return self._attributes[ref.text]
        return tuple(_BATCH if size is None else size for size in self._shapes[ref.text])

    def _activation(self, steps: Sequence[Evaluable], x: Ref) -> Statement | None:
        left = list(_ACTIVATIONS)
        for seed, scale in enumerate(_SCALES):
            (drawn_x,) = drawn([self._sizes(x)], seed, scale)
            value = evaluated(steps, {x: drawn_x})
            left = [name for name in left if agree(value, _activated(name, drawn_x))]
            if not left:
                return None
        return Statement("", left[0], f"{_FUNCTIONAL}.{left[0]}({{0}})", (x,))

    def _relu(self, steps: Sequence[Evaluable], x: Ref) -> Statement | None:
        """A ReLU in pieces of its own; at 0, its gradient is any subgradient: clamp(min=0) has 1, maximum a half."""
        sizes = self._sizes(x)
        numbers = torch.tensor(_ENDS, dtype=torch.float64).repeat(math.prod(sizes) // len(_ENDS) + 1)
        given = numbers[: math.prod(sizes)].reshape(sizes).requires_grad_()
        value = evaluated(steps, {x: given}, gradients=True)
        if not agree(value, given.relu()) or not isinstance(value, Tensor) or not value.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(value.sum(), given)
        same = torch.equal(gradient[given != 0], (given > 0).to(gradient.dtype)[given != 0])
        same = same and bool(((gradient >= 0) & (gradient <= 1)).all())
        return Statement("", "relu", f"{_FUNCTIONAL}.relu({{0}})", (x,)) if same else None

    def _norm(self, steps: Sequence[Evaluable], inputs: _Inputs, shape: Shape) -> Statement | None:
        (x,), width = inputs.locals, shape[-1]
        if width is None or any(self._attributes[ref.text] != (width,) for ref in inputs.attributes):
            return None
        for kind, weight, bias in _norms(inputs.attributes):
            eps = self._eps(steps, kind, x, weight, bias)
            if eps is not None and self._is_norm(steps, kind, eps, x, weight, bias):
                return _norm_statement(kind, width, eps, x, weight, bias)
        return None

    def _eps(self, steps: Sequence[Evaluable], kind: str, x: Ref, weight: Ref | None, bias: Ref | None) -> float | None:
        """The eps of a norm with a weight of ones and a bias of zeros, whatever it is with others."""
        (drawn_x,) = drawn([self._sizes(x)], seed=7, scale=1e-3)
        values = {x: drawn_x}
        if weight is not None:
            values[weight] = torch.ones(self._attributes[weight.text], dtype=torch.float64)
        if bias is not None:
            values[bias] = torch.zeros(self._attributes[bias.text], dtype=torch.float64)
        value = evaluated(steps, values)
        if not isinstance(value, Tensor) or value.shape != drawn_x.shape:
            return None
        centred = drawn_x - drawn_x.mean(-1, keepdim=True) if kind == "layer_norm" else drawn_x
        estimates = (centred / value).square() - centred.square().mean(-1, keepdim=True)
        eps = float(f"{estimates.median().item():.6g}")
        return eps if _LEAST_EPS < eps < 0.1 else None

    def _is_norm(
        self, steps: Sequence[Evaluable], kind: str, eps: float, x: Ref, weight: Ref | None, bias: Ref | None
    ) -> bool:
        for seed, scale in enumerate(_SCALES):
            refs = [ref for ref in (x, weight, bias) if ref is not None]
            values = dict(zip(refs, drawn([self._sizes(ref) for ref in refs], seed), strict=True))
            values[x] = values[x] * scale + scale
            affine = [None if ref is None else values[ref] for ref in (weight, bias)]
            normed = _normed(kind, eps, values[x], *affine)
            if not agree(evaluated(steps, values), normed):
                return False
        return True

    def _sum_or_product(
        self, run: Sequence[Statement], steps: Sequence[Evaluable], refs: tuple[Ref, ...], shape: Shape
    ) -> Statement | None:
        if len(run) == 1 and run[0].template in _PLAIN:
            return None
        if any(self._shapes[ref.text] != shape for ref in refs):
            return None
        a, b = drawn([self._sizes(ref) for ref in refs], seed=1)
        value = evaluated(steps, dict(zip(refs, (a, b), strict=True)))
        for op, sign, result in (("add", "+", a + b), ("mul", "*", a * b)):
            if agree(value, result):
                return Statement("", op, f"{{0}} {sign} {{1}}", refs)
        return None

    def _product_and_sum(
        self, step: Statement, steps: Sequence[Evaluable], refs: tuple[Ref, ...], shape: Shape
    ) -> list[Statement]:
        """a * b, and the sum of c and it; b may be c."""
        if any(self._shapes[ref.text] != shape for ref in refs):
            return []
        values = dict(zip(refs, drawn([self._sizes(ref) for ref in refs], seed=1), strict=True))
        result = evaluated(steps, values)
        for c, a, b in product(refs, repeat=3):
            if a.text <= b.text and agree(result, values[c] + values[a] * values[b]):
                made = Ref(RefKind.LOCAL, self._fresh(f"{step.target}_product"))
                return [
                    Statement(made.text, "mul", "{0} * {1}", (a, b), note=step.note, written=(step,)),
                    Statement(step.target, "add", "{0} + {1}", (made, c), note=step.note),
                ]
        return []

    def _fresh(self, name: str) -> str:
        while name in self._shapes:
            name += "_"
        return name

    def _concatenation(self, steps: Sequence[Evaluable], inputs: _Inputs, shape: Shape) -> Statement | None:
        parts = drawn([self._sizes(ref) for ref in inputs.locals], seed=1)
        value = evaluated(steps, dict(zip(inputs.locals, parts, strict=True)))
        if len(shape) != 3 or not isinstance(value, Tensor):
            return None
        fits = all(part.dim() == 3 and part.shape[::2] == value.shape[::2] for part in parts)
        if not fits or not agree(value, torch.cat(parts, 1)):
            return None
        return Statement("", "cat", "torch.cat([{0}, {1}], 1)", inputs.locals)


def _norms(attributes: tuple[Ref, ...]) -> Iterator[tuple[str, Ref | None, Ref | None]]:
    """The norms with these Parameters: kind, weight and bias."""
    if len(attributes) == 2:
        yield "layer_norm", attributes[0], attributes[1]
        yield "layer_norm", attributes[1], attributes[0]
        return
    for kind in _NORMS:
        yield kind, attributes[0] if attributes else None, None


def _norm_statement(kind: str, width: int, eps: float, x: Ref, weight: Ref | None, bias: Ref | None) -> Statement:
    refs = [x, *(ref for ref in (weight, bias) if ref is not None)]
    given = {ref: f"{{{place}}}" for place, ref in enumerate(refs)}
    affine = [str(ref and given[ref]) for ref in ((weight, bias) if kind == "layer_norm" else (weight,))]
    return Statement("", kind, f"{_FUNCTIONAL}.{kind}({{0}}, ({width},), {', '.join(affine)}, {eps!r})", tuple(refs))


def _normed(kind: str, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind == "layer_norm":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _activated(name: str, x: Tensor) -> Tensor:
    result: Tensor = getattr(torch.nn.functional, name)(x)
    return result
