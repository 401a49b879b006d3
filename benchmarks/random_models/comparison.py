"""Runs a model on a case, and says where another one leaves anything else behind."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS = (1, 2, 3, 7, 64, 128, 300)
MODES = ("training", "evaluation", "training, some children in evaluation", "evaluation, some children in training")
TOLERANCE = 1e-3  # of root mean squares
COARSE_TOLERANCE = 0.3  # under bfloat16 autocast, which rounds; of gradients three times that
FLOOR, COARSE_FLOOR = 0.1, 0.3  # of the largest root mean square of its kind, below which values are noise
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


def run(model: nn.Module, module: ModuleType, case: Case) -> Outcome:
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


def difference(own: Outcome, bound: Outcome, case: Case) -> str | None:
    """The first thing that a bound model leaves otherwise than the unbound one, in words; None where there is none.

    Raises the LokaError, or another exception, that the bound model alone raised.
    """
    if own.raised is not None:
        if bound.raised is None:
            return f"runs where the unbound model raises {type(own.raised).__name__}: {own.raised}"
        return None
    if bound.raised is not None:
        raise bound.raised
    tolerance, floor = (COARSE_TOLERANCE, COARSE_FLOOR) if case.autocast else (TOLERANCE, FLOOR)
    largest: dict[str, float] = {}
    for (kind, _), value in own.values.items():
        if isinstance(value, Tensor):
            largest[kind] = max(largest.get(kind, 0.0), _size(value))
    for (kind, name), value in own.values.items():
        if (kind, name) not in bound.values:
            if kind == "attribute" and not isinstance(value, Tensor | _PLAIN):
                continue
            return f"has no {kind} {name}"
        allowed = tolerance * (3 if case.autocast and kind.startswith("gradient") else 1)
        words = _differs(value, bound.values[kind, name], allowed, floor * largest.get(kind, 0.0))
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


def _differs(own: object, bound: object, tolerance: float, floor: float) -> str | None:
    if isinstance(own, Tensor) and isinstance(bound, Tensor):
        if (own.dtype, own.shape) != (bound.dtype, bound.shape):
            return f"{bound.dtype} of {tuple(bound.shape)} instead of {own.dtype} of {tuple(own.shape)}"
        a, b = own.double(), bound.double()
        finite = a.isfinite() & b.isfinite()
        strange = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
        off = _size(torch.where(finite, a - b, 0.0))
        limit = tolerance * max(_size(a), floor) if own.is_floating_point() else 0.0
        return f"off by {off / max(_size(a), 1e-30):.3g}" if off > limit or strange.any() else None
    if isinstance(own, Tensor) or isinstance(bound, Tensor) or own is None or bound is None:
        return None if own is bound else f"{_named(bound)} instead of {_named(own)}"
    if isinstance(own, float) and isinstance(bound, float):
        return None if math.isclose(own, bound, rel_tol=tolerance) else f"{bound} instead of {own}"
    return f"{_named(bound)} instead of {_named(own)}" if isinstance(own, _PLAIN) and own != bound else None


def _size(tensor: Tensor) -> float:
    """The root mean square of finite elements."""
    values = tensor.detach().double()
    values = values[values.isfinite()]
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _named(value: object) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
