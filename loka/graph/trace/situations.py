"""The situations in which a forward is captured: modes, gradients, autocast, dtypes of arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.graph.capture.captured import Captured
from loka.graph.capture.sources import Source
from loka.graph.capture.undisturbed import unchanged


@dataclass(frozen=True, slots=True)
class Situation:
    """What is varied in one capture. No two columns of `SITUATIONS` are alike, so that each is told by its pattern."""

    training: bool
    gradients: bool
    autocast: torch.dtype | None = None
    narrow: bool = False  # floating-point arguments in that dtype, as inside of a model under autocast
    on: frozenset[str] | None = None  # modules in training, all others in evaluation

    def mode(self, path: str) -> bool:
        """Whether a module is in training."""
        return self.training if self.on is None else path in self.on


@dataclass(frozen=True, slots=True)
class Seen:
    """A capture in a situation."""

    situation: Situation
    captured: Captured


SITUATIONS = (
    Situation(training=True, gradients=True),
    Situation(training=False, gradients=False, autocast=torch.bfloat16),
    Situation(training=True, gradients=False, autocast=torch.bfloat16, narrow=True),
    Situation(training=False, gradients=True, autocast=torch.float16, narrow=True),
)
DIFFERENCES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("in training than in evaluation", {"training": False}),
    ("without gradients", {"gradients": False}),
    ("under autocast", {"autocast": torch.bfloat16}),
    ("on bfloat16 arguments", {"autocast": torch.bfloat16, "narrow": True}),
    ("on float16 arguments", {"autocast": torch.float16, "narrow": True}),
)


@contextlib.contextmanager
def in_situation(module: nn.Module, situation: Situation) -> Iterator[None]:
    """A module in the modes of a situation."""
    with unchanged(module):
        for name, child in module.named_modules():
            child.training = situation.mode(name)
        yield


def followed(value: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    for kind, key in steps:
        value = getattr(value, key) if kind == "." else value[key]
    return value


def leaves_in(value: Any, source: Source) -> Iterator[tuple[Source, Any]]:
    """The leaves of an argument's dicts, lists and tuples."""
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        yield source, value
        return
    for key, item in parts:
        yield from leaves_in(item, Source(source.root, (*source.steps, ("[]", key)), ""))


def differentiable(value: Any) -> Any:
    """A floating-point tensor as another layer returns it: it needs a gradient, and may be changed in place."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_().clone() if is_float else value


def narrowed(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
