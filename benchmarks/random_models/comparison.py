"""Runs a model on a case, and says where another one leaves anything else behind."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS = (1, 2, 3, 7, 64, 128, 300)
MODES = ("training", "evaluation", "training, some children in evaluation", "evaluation, some children in training")
# Of root mean squares, by the narrowest dtype of the model itself.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
COARSE_TOLERANCE = 0.3  # under bfloat16 autocast, which rounds; of gradients three times that
FLOOR, COARSE_FLOOR = 0.1, 0.3  # of the largest root mean square of its kind, below which values are noise
# Of every value, a few roundings of its dtype: what a model makes of that, it makes of another order of sums.
NUDGES = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8}
OF_NUDGES = 4.0  # times what nudges change, a bound model may differ
_PLAIN = (int, float, bool, str, torch.Size, torch.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a model."""

    rows: int
    mode: str
    autocast: bool
    gradients: bool
    loss: float  # factor of the loss
    seed: int

    def __str__(self) -> str:
        settings = (", autocast" * self.autocast, "" if self.gradients else ", no gradients", f", loss x {self.loss:g}")
        return f"{self.rows} rows, {self.mode}{''.join(settings)}"


def cases(seed: int) -> list[Case]:
    """Four calls for each number of rows, so that every mode meets every setting; those under autocast come last."""
    made = []
    for place, rows in enumerate(ROWS):
        for turn, mode in enumerate(MODES):
            number = 4 * place + turn
            settings = divmod(place + turn + seed, 2)
            autocast, gradients = (settings[0] + place) % 3 == 0, settings[1] == 0 or mode == "training"
            made.append(Case(rows, mode, autocast, gradients, 1.0 if number % 3 else 1e6, 100 * seed + number))
    return sorted(made, key=lambda case: case.autocast)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a call leaves: kind and name -> value; or the exception that it raised."""

    values: dict[tuple[str, str], object]
    raised: Exception | None = None


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the unbound model's own tensors are off in a case where all values are off by rounding."""

    dtype: torch.dtype = torch.float32  # the narrowest that the model itself rounds to
    offs: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Nudge:
    """Numbers by which values are off by a few roundings."""

    numbers: torch.Generator
    dtype: torch.dtype = torch.float32

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor with each of its values off."""
        if not tensor.is_floating_point():
            return tensor
        off = torch.randn(tensor.shape, generator=self.numbers, dtype=torch.float64) * NUDGES[self.dtype]
        return (tensor.detach().double() * (1 + off)).to(tensor.dtype)


class Dtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen |= {each.dtype for each in tree_leaves(made) if isinstance(each, Tensor)}
        return made


def run(model: nn.Module, module: ModuleType, case: Case, nudge: Nudge | None = None) -> Outcome:
    """Call a model of `module` on its own inputs, drawn by the case's seed, with a backward where it has gradients."""
    _seed(case.seed)
    children = random.Random(case.seed)
    model.train(case.mode.startswith("training"))
    for _, child in list(model.named_modules())[1:]:
        if "some" in case.mode and children.random() < 0.5:
            child.training = not model.training
    model.zero_grad()
    leaves: list[Tensor] = []

    def differentiable(tensor: Tensor) -> Tensor:
        if not (case.gradients and tensor.is_floating_point()):
            return tensor
        leaves.append(tensor.requires_grad_())
        return tensor * 1.0  # no leaf, so that a model may change it in place

    made = module.example_inputs(case.rows)
    if nudge is not None:
        made = mapped(made, nudge.of)
    given = mapped(made, differentiable)
    _seed(case.seed)
    try:
        mixed = torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()
        with mixed, torch.set_grad_enabled(case.gradients):
            output = model(**given) if isinstance(given, dict) else model(*given)
        results = [each for _, each in leaves_of(output) if isinstance(each, Tensor) and each.requires_grad]
        if case.gradients and results:
            weights = [torch.linspace(-1, 2, each.numel()).view(each.shape) for each in results]
            torch.stack([(x.float() * w).sum() for x, w in zip(results, weights, strict=True)]).sum().mul(
                case.loss
            ).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        return Outcome({}, error)
    values: dict[tuple[str, str], object] = {}
    for kind, found in (("output", output), ("input", given)):
        values |= {(kind, name): each for name, each in leaves_of(found)}
    for name, each in leaves_of(output):
        if isinstance(each, Tensor):
            values["requires_grad of the output", name] = each.requires_grad
    values |= {("gradient of an input", str(number)): leaf.grad for number, leaf in enumerate(leaves)}
    for name, parameter in model.named_parameters():
        values |= {("gradient", name): parameter.grad, ("parameter", name): parameter}
    values |= {("buffer", name): each for name, each in model.named_buffers()}
    for path, owner in model.named_modules():
        for name, value in vars(owner).items():
            if name != "training" and not name.startswith("_"):
                values |= {("attribute", f"{path}.{name}{at}"): each for at, each in leaves_of(value)}
    state: Any = np.random.get_state()
    values |= {("random state", "torch"): torch.get_rng_state(), ("random state", "random"): str(random.getstate())}
    values["random state", "numpy"] = str([part.tolist() if isinstance(part, np.ndarray) else part for part in state])
    return Outcome({name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in values.items()})


def deviations(own: Outcome, other: Outcome) -> dict[tuple[str, str], float]:
    """The root mean square of the difference between each floating-point tensor and that of another run."""
    found = {}
    for key, a in own.values.items():
        b = other.values.get(key)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.shape == b.shape:
            found[key] = _off(a.double(), b.double())
    return found


def difference(own: Outcome, bound: Outcome, case: Case, noise: Noise | None = None) -> str | None:
    """The first thing that a bound model leaves otherwise than the unbound one, in words; None where there is none.

    `noise` is the rounding that the model itself enlarges. Raises the LokaError, or another exception, that the bound
    model alone raised.
    """
    noise = noise or Noise()
    if own.raised is not None:
        if bound.raised is None:
            return f"runs where the unbound model raises {type(own.raised).__name__}: {own.raised}"
        return None
    if bound.raised is not None:
        raise bound.raised
    tolerance, floor = (COARSE_TOLERANCE, COARSE_FLOOR) if case.autocast else (TOLERANCES[noise.dtype], FLOOR)
    for (kind, name), value in own.values.items():
        if (kind, name) not in bound.values:
            if kind == "attribute" and not isinstance(value, Tensor | _PLAIN):
                continue
            return f"has no {kind} {name}"
        other = bound.values[kind, name]
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dtype == other.dtype:  # noqa: SIM102
            if torch.equal(value, other):
                continue
        allowed = tolerance * (3 if case.autocast and kind.startswith("gradient") else 1)
        largest = max((_size(each) for (of, _), each in own.values.items() if of == kind), default=0.0)
        words = _differs(value, other, allowed, floor * largest, OF_NUDGES * noise.offs.get((kind, name), 0.0))
        if words:
            return f"another {kind} {name}".rstrip() + f": {words}"
    more = [name for kind, name in bound.values.keys() - own.values if kind in ("output", "input")]
    return f"has more outputs: {more}" if more else None


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested value with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)))
    return value


def leaves_of(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of each part of a nested value; the types of containers are values, too."""
    parts: Any = None
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple | deque) and not isinstance(value, torch.Size):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if parts is None:
        yield at, value
        return
    yield f"{at} type", type(value).__name__
    for key, each in parts:
        yield from leaves_of(each, f"{at}[{key}]")


def _differs(own: object, bound: object, tolerance: float, floor: float, noise: float) -> str | None:
    if isinstance(own, Tensor) and isinstance(bound, Tensor):
        if (own.dtype, own.shape) != (bound.dtype, bound.shape):
            return f"{bound.dtype} of {tuple(bound.shape)} instead of {own.dtype} of {tuple(own.shape)}"
        a, b = own.double(), bound.double()
        finite = a.isfinite() & b.isfinite()
        strange = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
        off = _off(a, b)
        limit = tolerance * max(_size(a), floor) + noise if own.is_floating_point() else 0.0
        return f"off by {off / max(_size(a), 1e-30):.3g}" if off > limit or strange.any() else None
    if isinstance(own, Tensor) or isinstance(bound, Tensor) or own is None or bound is None:
        return None if own is bound else f"{_named(bound)} instead of {_named(own)}"
    if isinstance(own, float) and isinstance(bound, float):
        return None if math.isclose(own, bound, rel_tol=tolerance) else f"{bound} instead of {own}"
    return f"{_named(bound)} instead of {_named(own)}" if isinstance(own, _PLAIN) and own != bound else None


def _off(a: Tensor, b: Tensor) -> float:
    return _size(torch.where(a.isfinite() & b.isfinite(), a - b, 0.0))


def _size(value: object) -> float:
    """The root mean square of a tensor's finite elements."""
    if not isinstance(value, Tensor):
        return 0.0
    values = value.detach().double()
    values = values[values.isfinite()]
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _named(value: object) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # the seed of a model may be a time
