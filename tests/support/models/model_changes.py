"""Every way in which a model may be changed: children, their order, constants, Parameters, buffers, of any module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models.changed_models import WIDTH, Settings

Do = Callable[[nn.Module], object]

LEAVES: dict[str, Callable[[], nn.Module]] = {
    "a linear": lambda: seeded(nn.Linear(WIDTH, WIDTH)),
    "a SiLU": nn.SiLU,
    "a GELU": nn.GELU,
    "a LeakyReLU": lambda: nn.LeakyReLU(0.7),
    "a Dropout": lambda: nn.Dropout(0.4),
    "an Identity": nn.Identity,
    "a LayerNorm": lambda: nn.LayerNorm(WIDTH, eps=0.1),
    "a Sequential": lambda: nn.Sequential(seeded(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "an empty Sequential": nn.Sequential,
}
FUNCTIONS = (torch.tanh, torch.sin, F.gelu, functools.partial(F.leaky_relu, negative_slope=0.9))


_OF_TORCH = frozenset(vars(nn.Module())) | {"_size", "_keys"}


@dataclass(frozen=True)
class Change:
    """One change of one module, called by its path in the model."""

    place: str
    words: str
    make: Do  # takes the model

    def __repr__(self) -> str:
        return f"{self.place!r}: {self.words}"


def changes(model: nn.Module) -> list[Change]:
    """Everything that may be done to a model, module by module."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        found += [Change(path, words, _on(path, do)) for words, do in _of_module(module)]
    return found


def _on(path: str, do: Do) -> Do:
    return lambda model: do(model.get_submodule(path))


def seeded(module: nn.Module) -> nn.Module:
    """The module with weights that are the same each time."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def _of_module(module: nn.Module) -> Iterator[tuple[str, Do]]:
    """Every change of a module, in words, and as what makes it."""
    yield from _containers(module)
    yield from _children(module)
    yield from _attributes(module)
    yield from _tensors(module)


def _containers(module: nn.Module) -> Iterator[tuple[str, Do]]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        for words, leaf in LEAVES.items():
            yield f"{words} is appended", lambda m, leaf=leaf: m.append(leaf())
            if all(name == str(place) for place, name in enumerate(module._modules)):
                yield f"{words} is inserted", lambda m, leaf=leaf: m.insert(0, leaf())
        yield "it is emptied", lambda m: m.__delitem__(slice(None))
        if len(module):
            yield "its first item goes", lambda m: m.__delitem__(0)
            yield "its last item goes", lambda m: m.__delitem__(-1)
            yield "its first item is there once more", lambda m: m.append(m[0])
    if isinstance(module, nn.ModuleDict | nn.ParameterDict):
        item = (lambda: LEAVES["a linear"]()) if isinstance(module, nn.ModuleDict) else (lambda: torch.rand(WIDTH))
        yield "it has a new key", lambda m: m.update({"new": item()})
        yield "it is cleared", lambda m: m.clear()
        if len(module):
            yield "its first key goes", lambda m: m.pop(next(iter(m.keys())))
    if isinstance(module, nn.ParameterDict):
        yield "its keys are in another order", lambda m: setattr(m, "_keys", dict.fromkeys(reversed(list(m._keys))))
    if isinstance(module, nn.ParameterList):
        yield "a Parameter is appended", lambda m: m.append(nn.Parameter(torch.eye(WIDTH)))
        yield "it is shorter", lambda m: setattr(m, "_size", m._size - 1)
        if len(module) > 1:
            yield "its last two are exchanged", _exchange_parameters
            yield "its last is there twice", lambda m: m.__setitem__(-2, m[-1])
    if len(module._modules) > 1:
        yield "its children are in another order", _reverse
        yield "its first two children are exchanged", _exchange
        yield "its second child is the first", _repeat


def _reverse(module: nn.Module) -> None:
    items = list(module._modules.items())
    module._modules.clear()
    module._modules.update(reversed(items))


def _exchange(module: nn.Module) -> None:
    (a, one), (b, two) = list(module._modules.items())[:2]
    module._modules[a], module._modules[b] = two, one


def _exchange_parameters(module: nn.ParameterList) -> None:
    module[-1], module[-2] = module[-2], module[-1]


def _repeat(module: nn.Module) -> None:
    (_, one), (b, _) = list(module._modules.items())[:2]
    module._modules[b] = one


def _children(module: nn.Module) -> Iterator[tuple[str, Do]]:
    for name in module._modules:
        for words, leaf in LEAVES.items():
            yield f"{name!r} is {words}", lambda m, name=name, leaf=leaf: m._modules.update({name: leaf()})
        yield f"{name!r} is a copy", lambda m, name=name: m._modules.update({name: copy.deepcopy(m._modules[name])})
        yield f"{name!r} is None", lambda m, name=name: m._modules.update({name: None})
        yield f"{name!r} goes", lambda m, name=name: m._modules.pop(name)
    for name in ("late", "gate"):
        yield f"a child {name!r} is added", lambda m, name=name: _add(m, name)


def _add(module: nn.Module, name: str) -> None:
    vars(module).pop(name, None)
    module.add_module(name, LEAVES["a linear"]())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Do]]:
    for name, value in [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]:
        for number, other in enumerate(_others(value)):
            words = f"other list {number}" if isinstance(value, list) else repr(other)
            yield f"{name} is {words}", lambda m, name=name, other=other: setattr(m, name, copy.deepcopy(other))
        if isinstance(value, list):
            yield f"{name} is shorter, in place", lambda m, name=name: getattr(m, name).pop()
        if isinstance(value, dict):
            yield f"{name} has other values, in place", lambda m, name=name: getattr(m, name).update(dim=0)
        yield f"{name} goes", lambda m, name=name: vars(m).pop(name)
    for name in [name for name, value in vars(type(module)).items() if type(value) is int]:
        yield f"{name} of the class is hidden", lambda m, name=name: setattr(m, name, 3)
    yield "an attribute that nothing reads", lambda m: setattr(m, "unread", 3)


def _others(value: object) -> Iterator[object]:
    """Other values that an attribute may take."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 0, float(value))
    elif isinstance(value, float):
        yield from (value * 0.5, value + 0.4, 1)
    elif isinstance(value, str):
        yield from ("tanh", "none", "relu", "c")
    elif isinstance(value, tuple):
        yield from (value[:-1], (*value, *value[-1:]), value[::-1])
    elif isinstance(value, list):
        yield from (value[::-1], value * 2)
    elif isinstance(value, Settings):
        yield from (Settings(3, 1), Settings(2, 2), Settings(2, 1))
    elif callable(value) and not isinstance(value, nn.Module):
        yield from FUNCTIONS
    elif value is None:
        yield torch.ones(WIDTH)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Do]]:
    for name, parameter in module._parameters.items():
        if parameter is None:
            yield f"{name} is a Parameter", lambda m, name=name: _set(m, name, torch.ones(WIDTH))
            continue
        yield f"{name} has other values", lambda m, name=name: _set(m, name, getattr(m, name).detach().flip(0))
        yield f"{name} has another shape", lambda m, name=name: _set(m, name, getattr(m, name).detach()[:1])
        yield f"{name} is None", lambda m, name=name: m._parameters.update({name: None})
        yield f"{name} goes", lambda m, name=name: m._parameters.pop(name)
    for name in module._buffers:
        yield f"the buffer {name} has another shape", lambda m, name=name: m._buffers.update({name: torch.ones(1)})
        yield (
            f"the buffer {name} has other values",
            lambda m, name=name: m._buffers.update({name: m._buffers[name] * 2}),
        )
    yield "it has a new buffer", lambda m: m.register_buffer("new", torch.ones(2))
    yield "it has a new Parameter", lambda m: m.register_parameter("spare", nn.Parameter(torch.ones(2)))
    yield "its Parameters are doubles", lambda m: m.double()


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    module._parameters[name] = nn.Parameter(value.clone())
