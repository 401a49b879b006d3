"""The activations that kernels are rendered with: what sets one apart, for specs, names, docstrings and on the CPU.

An activation and its gradient are written here in torch, in float32, and in Triton in
`templates/triton/device/activations.py.j2`. Specs name it as torch does, with a constant that is not torch's own:
"silu", "leaky_relu", "leaky_relu(0.2)".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.errors import InputError


@dataclass(frozen=True, slots=True)
class ActivationTraits:
    """What the kernels of an activation have in common, whatever they are fused with."""

    title: str  # in docstrings: "SiLU"
    function: Callable[..., Tensor]  # of z (M, width), and of the constant if it has one
    gradient: Callable[..., Tensor]  # of the result's gradient, z, and the constant: the gradient of z
    constant: float | None = None  # torch's own


def _silu_gradient(grad: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return grad * sigmoid * (1.0 + z * (1.0 - sigmoid))


def _sigmoid_gradient(grad: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(z)
    return grad * sigmoid * (1.0 - sigmoid)


def _hardswish_gradient(grad: Tensor, z: Tensor) -> Tensor:
    slope = torch.where(z < 3.0, grad * (z / 3.0 + 0.5), grad)
    return torch.where(z <= -3.0, 0.0, slope)


def _gelu_gradient(grad: Tensor, z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return grad * (0.5 * (1.0 + torch.erf(z * math.sqrt(0.5))) + z * density)


def _tanh_gradient(grad: Tensor, z: Tensor) -> Tensor:
    """1 - tanh(z)**2 without the difference, of which nothing would be left for a large z."""
    e = torch.exp(-2.0 * z.abs())
    return grad * 4.0 * e / (1.0 + e).square()


def _leaky_relu_gradient(grad: Tensor, z: Tensor, slope: float) -> Tensor:
    return torch.where(z > 0.0, grad, grad * slope)


ACTIVATIONS: Mapping[str, ActivationTraits] = MappingProxyType(
    {
        "relu": ActivationTraits(
            "ReLU", lambda z: torch.where(z < 0.0, 0.0, z), lambda grad, z: torch.where(z <= 0.0, 0.0, grad)
        ),
        "silu": ActivationTraits("SiLU", lambda z: z * torch.sigmoid(z), _silu_gradient),
        "sigmoid": ActivationTraits("sigmoid", torch.sigmoid, _sigmoid_gradient),
        "hardswish": ActivationTraits("Hard Swish", F.hardswish, _hardswish_gradient),
        "gelu": ActivationTraits("GELU", F.gelu, _gelu_gradient),  # the exact one, by erf
        "tanh": ActivationTraits("tanh", torch.tanh, _tanh_gradient),
        "leaky_relu": ActivationTraits("LeakyReLU", F.leaky_relu, _leaky_relu_gradient, 0.01),
    }
)
# Factors of what a norm takes, made of what it gives: SwishNorm.
GATES: Mapping[str, ActivationTraits] = MappingProxyType(
    {
        "gate_sigmoid": ActivationTraits("sigmoid gate", torch.sigmoid, _sigmoid_gradient),
        "gate_hardsigmoid": ActivationTraits(
            "hard gate", F.hardsigmoid, lambda grad, z: torch.where((z > -3.0) & (z < 3.0), grad / 6.0, 0.0)
        ),
    }
)


_ALL = {**ACTIVATIONS, **GATES}
_NAMED = re.compile(r"(\w+)(?:\((0\.\d+|\d(?:\.\d+)?e-\d+)\))?")  # a number between 0 and 1 as Python writes it


def name_and_constants(activation: str) -> tuple[str, tuple[float, ...]]:
    """Name in the tables of an activation or a gate, and its constants: leaky_relu and (0.2,) of "leaky_relu(0.2)".

    Raises InputError for one that there is not.
    """
    named = _NAMED.fullmatch(activation)
    traits = _ALL.get(named[1]) if named is not None else None
    if named is None or traits is None or (named[2] and traits.constant is None):
        raise InputError(f"no kernel has an activation {activation!r}; it can be {', '.join(_ALL)} or None")
    constant = float(named[2]) if named[2] else traits.constant
    return named[1], () if constant is None else (constant,)


def activation_title(activation: str) -> str:
    """An activation or a gate in docstrings: "LeakyReLU 0.2"."""
    name, constants = name_and_constants(activation)
    return " ".join([_ALL[name].title, *map(str, constants)])


def activated(z: Tensor, activation: str | None, gate_input: Tensor) -> Tensor:
    """The activation of z (M, width), None for z itself; a gate multiplies gate_input (M, width) by its function."""
    if activation is None:
        return z
    name, constants = name_and_constants(activation)
    y = _ALL[name].function(z, *constants)
    return gate_input * y if name in GATES else y


def gradient_of(grad: Tensor, z: Tensor, activation: str | None, gate_input: Tensor) -> Tensor:
    """The gradient of z from that of `activated`, grad; all (M, width)."""
    if activation is None:
        return grad
    name, constants = name_and_constants(activation)
    return _ALL[name].gradient(grad * gate_input if name in GATES else grad, z, *constants)


def gradient_past(grad: Tensor, z: Tensor, activation: str | None) -> Tensor | float:
    """The part of the gradient of gate_input that does not go through z, from that of `activated`; 0 without a gate."""
    return grad * GATES[activation].function(z) if activation in GATES and activation is not None else 0.0
