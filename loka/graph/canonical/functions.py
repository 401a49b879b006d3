"""Norms and activations, told by what operations compute: they are evaluated on drawn numbers.

Two functions made of sums, products, quotients, powers, means and the like are analytic: where they agree at a few
random points, they are the same function. So it does not matter how a function is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from loka.graph.canonical.layout import Size
from loka.graph.canonical.nodes import Activation, Norm, Other, Pair, Product, Value, is_weight
from loka.graph.canonical.recording import AtenCall
from loka.graph.ir import LEAKY_RELU, SLOPE, is_slope

_LONGEST = 24  # operations of a function
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch.nn.functional, name)
    for name in (
        *("relu", "silu", "gelu", "sigmoid", "tanh", "softplus", "mish", "relu6", "hardswish", "hardsigmoid"),
        *("elu", "selu", "softsign", "logsigmoid"),
    )
}
_REDUCING = frozenset({"mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "native_group_norm"})
_SCALES = (1.0, 0.02, 30.0)  # of drawn inputs: where eps is nothing, and where it is all
_LARGE = 1e15  # beyond what a clamp leaves
_LEAST_EPS = 1e-18  # what is less is rounding: the norm has none, and gives NaN for a row of zeros
_ENDS = (0.0, -1.0, 1.0, 1e-30, -1e-30, 0.5, -0.5, 7.0, -7.0, 1e30, -1e30)  # where pieces of a function may begin
_LAST = frozenset({"mul", "div", "add", "sub", "rsub", "addcmul", "addcdiv", *_NORMS})  # operations that end a norm


@dataclass(frozen=True, slots=True)
class Pieces:
    """The operations of a forward so far, by the id of the tensor that each made."""

    calls: Mapping[int, AtenCall]
    values: Mapping[int, Value]
    shapes: Mapping[int, tuple[Size, ...]]


@dataclass(frozen=True, slots=True)
class Known:
    """A function of torch's: an activation, or a norm over some dimensions of x; with these, its weight and bias."""

    name: str
    x: Value
    over: tuple[int, ...] = ()
    eps: float = 0.0
    weight: Value | None = None
    bias: Value | None = None
    constants: tuple[float, ...] = ()  # of an activation, where they are not torch's own


@dataclass(frozen=True, slots=True)
class _Cone:
    """The operations between one tensor and another, and the weights that they read."""

    calls: tuple[AtenCall, ...]
    result: Tensor
    x: Tensor
    weights: tuple[Tensor, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(call.name for call in self.calls)

    def evaluated(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        """The result for other numbers; None where that cannot be computed."""
        known: dict[int, Tensor] = {id(self.x): x} | {id(w): v for w, v in zip(self.weights, weights, strict=True)}

        def put(value: Any) -> Any:
            return known.get(id(value), value) if isinstance(value, Tensor) else value

        try:
            for call in self.calls:
                kwargs = {name: each for name, each in call.kwargs.items() if name != "dtype"}
                found = call.function(*tree_map(put, call.args), **tree_map(put, kwargs))
                for old, new in zip(call.made, [found] if isinstance(found, Tensor) else found, strict=False):
                    known[id(old)] = new
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        result = known.get(id(self.result))
        return result if result is not None and result.dtype == torch.float64 else None


def known_function(tensor: Tensor, pieces: Pieces) -> Known | None:
    """The function of torch's that a tensor is of another one; None where it is none."""
    best: Known | None = None
    for cone in _cones(tensor, pieces):
        if cone.x.shape != tensor.shape or tensor.dim() < 2:
            continue
        x = pieces.values[id(cone.x)]
        if cone.names & (_REDUCING | _NORMS):
            found = _norm(cone, x, pieces) if pieces.calls[id(tensor)].name.removesuffix("_") in _LAST else None
        else:
            found = None if cone.weights else _activation(cone, x)
        best = found or best
    return best


def _cones(tensor: Tensor, pieces: Pieces) -> Iterator[_Cone]:
    """The cones that end with a tensor and begin with a single one besides weights, the shortest first."""
    order = {id_: place for place, id_ in enumerate(pieces.calls)}
    waiting: dict[int, Tensor] = {id(tensor): tensor}
    calls: list[AtenCall] = []
    weights: dict[int, Tensor] = {}
    while waiting and len(calls) < _LONGEST:
        last = max(waiting, key=lambda each: order.get(each, -1))
        node = pieces.values[last].node if last in pieces.values else None
        inside = isinstance(node, Other | Pair | Norm | Activation | Product)
        if last not in pieces.calls or (calls and not inside):
            return
        taken = waiting.pop(last)
        call = pieces.calls[id(taken)]
        if call.name == "_to_copy" and torch.float64 in (call.read[0].dtype, call.made[0].dtype):
            return  # kernels compute in float32
        calls.append(call)
        for each in call.read:
            value = pieces.values.get(id(each))
            if value is None:
                return
            if is_weight(value.node):
                weights[id(each)] = each
            elif constant := _constant(each, pieces):
                calls += constant
            else:
                waiting[id(each)] = each
        if len(waiting) == 1:
            (x,) = waiting.values()
            yield _Cone(tuple(sorted(calls, key=lambda e: order[id(e.made[0])])), tensor, x, tuple(weights.values()))


def _constant(tensor: Tensor, pieces: Pieces) -> list[AtenCall]:
    """The operations that make zeros and the like, of no other tensor; () for another tensor."""
    made: list[AtenCall] = []
    waiting = [tensor]
    while waiting:
        call = pieces.calls.get(id(waiting.pop()))
        if call is None or len(made) == _LONGEST:
            return []
        made.append(call)
        waiting += call.read
    return made


def _drawn(shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale


def _agree(ours: Tensor | None, theirs: Tensor) -> bool:
    """True if two results are the same but for rounding."""
    same = ours is not None and ours.shape == theirs.shape
    return same and ours is not None and bool(torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12))


def _activation(cone: _Cone, x: Value) -> Known | None:
    slope = _slope(cone)
    functions: Mapping[str, Callable[[Tensor], Tensor]] = {
        **_ACTIVATIONS,
        LEAKY_RELU: partial(torch.nn.functional.leaky_relu, negative_slope=slope),
    }
    left = list(functions)
    for seed, scale in enumerate(_SCALES):
        given = _drawn(cone.x.shape, seed, scale)
        value = cone.evaluated(given, ())
        left = [name for name in left if _agree(value, functions[name](given))]
        if not left:
            return None
    if left[0] not in ("relu", LEAKY_RELU):
        return Known(left[0], x) if _hides_nothing(cone, functions[left[0]]) else None
    return Known(left[0], x, constants=() if slope in (0.0, SLOPE) else (slope,)) if _is_relu(cone, slope) else None


def _slope(cone: _Cone) -> float:
    """The slope of a LeakyReLU, by what it makes of -1; 0, as of a ReLU, where that is no sensible one."""
    value = cone.evaluated(torch.full(cone.x.shape, -1.0, dtype=torch.float64), ())
    slope = 0.0 if value is None else float(f"{-value.flatten()[0]:.12g}")
    return slope if is_slope(slope) else 0.0


def _hides_nothing(cone: _Cone, function: Callable[[Tensor], Tensor]) -> bool:
    """True if an activation is not of clamped numbers, nor of numbers for infinities and NaNs.

    Where its own intermediate results overflow, as in log(1 + exp(x)), it may be infinite or NaN.
    """
    given = _numbers((*_ENDS, math.inf, -math.inf, math.nan), cone.x.shape)
    ours, theirs = cone.evaluated(given, ()), function(given)
    if ours is None:
        return False
    finite = ours.isfinite()
    return _agree(ours[finite], theirs[finite])


def _numbers(numbers: Sequence[float], shape: Sequence[int]) -> Tensor:
    """A tensor with these numbers, again and again."""
    count = math.prod(shape)
    drawn = torch.tensor(numbers, dtype=torch.float64).repeat(count // len(numbers) + 1)
    return drawn[:count].reshape(tuple(shape))


def _is_relu(cone: _Cone, slope: float) -> bool:
    """True for a ReLU, or one with a slope, at the ends of its pieces, too; at 0 its gradient is one from 0 to 1."""
    given = _numbers((*_ENDS, math.inf), cone.x.shape).requires_grad_()
    with torch.enable_grad():
        value = cone.evaluated(given, ())
        wanted = torch.nn.functional.leaky_relu(given.detach(), slope)
        if value is None or not _agree(value.detach(), wanted) or not value.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(value.sum(), given)
    x = given.detach()
    moved = (x != 0) & x.isfinite()
    steepness = slope + (1.0 - slope) * (x > 0).to(x.dtype)
    same = _agree(gradient[moved], steepness[moved])
    return same and bool(((gradient >= 0) & (gradient <= 1)).all())


def _norm(cone: _Cone, x: Value, pieces: Pieces) -> Known | None:
    over = _reduced(cone)
    if not over or len(cone.weights) > 2 or any(not x.dims[dim] for dim in over):
        return None
    shapes = [_spread(weight, cone.x.dim(), over) for weight in cone.weights]
    if any(shape is None for shape in shapes):
        return None
    for kind, weight, bias in _kinds(len(cone.weights)):
        eps = _eps(cone, kind, weight, over)
        if eps is not None and _is_norm(cone, kind, eps, weight, bias, over):
            weights = [None if place is None else cone.weights[place] for place in (weight, bias)]
            affine = [None if each is None else _along(each, cone.x.dim(), over, pieces) for each in weights]
            if all(each is not None or place is None for each, place in zip(affine, (weight, bias), strict=True)):
                return Known(kind, x, over, eps, affine[0], affine[1])
    return None


def _reduced(cone: _Cone) -> tuple[int, ...]:
    """The dimensions of x that all statistics of a cone are over; () where there is no such."""
    found: set[tuple[int, ...]] = set()
    for call in cone.calls:
        if call.name in _REDUCING:
            of = call.args[0]
            given = call.given.get("dim")
            dims = [given] if isinstance(given, int) else given or list(range(of.dim()))
            if of.dim() != cone.x.dim():
                return ()
            found.add(tuple(sorted(each % of.dim() for each in dims)))
        elif call.name in ("native_layer_norm", "_fused_rms_norm"):
            of, count = call.args[0], len(call.args[1])
            if of.dim() != cone.x.dim():
                return ()
            found.add(tuple(range(of.dim() - count, of.dim())))
        elif call.name == "native_group_norm":
            found.add(tuple(range(1, cone.x.dim())))
    return next(iter(found)) if len(found) == 1 else ()


def _spread(weight: Tensor, dimensions: int, over: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a weight beside x; None where it differs along other dimensions than these."""
    shape = (1,) * (dimensions - weight.dim()) + tuple(weight.shape)
    return shape if all(size == 1 or place in over for place, size in enumerate(shape)) else None


def _along(weight: Tensor, dimensions: int, over: tuple[int, ...], pieces: Pieces) -> Value | None:
    """A weight by the dimensions of x that a norm is over; None where it has not all of them."""
    value = pieces.values[id(weight)]
    lead = dimensions - weight.dim()
    places = [place - lead for place in over]
    if any(place < 0 or not value.dims[place] for place in places):
        return None
    return Value(
        value.node, tuple(value.dims[place] for place in places), tuple(value.shape[place] for place in places)
    )


def _kinds(weights: int) -> Iterator[tuple[str, int | None, int | None]]:
    """The norms with so many weights: kind, and the places of weight and bias."""
    if weights == 2:
        yield "layer_norm", 0, 1
        yield "layer_norm", 1, 0
        return
    for kind in ("layer_norm", "rms_norm"):
        yield kind, 0 if weights else None, None


def _eps(cone: _Cone, kind: str, weight: int | None, over: tuple[int, ...]) -> float | None:
    """The eps of a norm with a weight of ones and a bias of zeros, whatever it is with others."""
    given = _drawn(cone.x.shape, seed=7, scale=1e-3)
    affine = [
        torch.ones(each.shape, dtype=torch.float64) * (1.0 if place == weight else 0.0)
        for place, each in enumerate(cone.weights)
    ]
    value = cone.evaluated(given, affine)
    if value is None or value.shape != given.shape:
        return None
    centred = given - given.mean(over, keepdim=True) if kind == "layer_norm" else given
    estimates = (centred / value).square() - centred.square().mean(over, keepdim=True)
    eps = float(f"{estimates.median().item():.6g}")
    return eps if _LEAST_EPS < eps < 0.1 else None


def _is_norm(cone: _Cone, kind: str, eps: float, weight: int | None, bias: int | None, over: tuple[int, ...]) -> bool:
    for seed, scale in enumerate(_SCALES):
        given = _drawn(cone.x.shape, seed) * scale + scale
        affine = [_drawn(each.shape, seed + 10 + place) for place, each in enumerate(cone.weights)]
        centred = given - given.mean(over, keepdim=True) if kind == "layer_norm" else given
        normed = centred * (centred.square().mean(over, keepdim=True) + eps).rsqrt()
        normed = normed if weight is None else normed * affine[weight]
        normed = normed if bias is None else normed + affine[bias]
        if not _agree(cone.evaluated(given, affine), normed):
            return False
    return _is_of_all_numbers(cone, kind, over)


def _is_of_all_numbers(cone: _Cone, kind: str, over: tuple[int, ...]) -> bool:
    """True if a norm is not of clamped numbers, nor of numbers for NaNs."""
    affine = [torch.ones(each.shape, dtype=torch.float64) for each in cone.weights]
    given = _drawn(cone.x.shape, seed=5) * _LARGE
    centred = given - given.mean(over, keepdim=True) if kind == "layer_norm" else given
    normed = centred * centred.square().mean(over, keepdim=True).rsqrt() + (len(affine) > 1)
    value = cone.evaluated(torch.full_like(given, math.nan), affine)
    return _agree(cone.evaluated(given, affine), normed) and value is not None and not value.isfinite().any()
