"""Comparison of the values built into a generated forward with the live model: modules, order, values, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from loka.dispatch.bind.bound import Binding, is_flat, plain_class, shown_type
from loka.graph.reads import (
    LIVE,
    PRESENT,
    SOURCE,
    NoValue,
    Reads,
    attribute_of,
    held_by,
    method_text,
    outside_values,
    value_text,
)
from loka.graph.source import same_type
from loka.graph.value_text import ValueTexts, tensor_text
from loka.mods.structure import inside

AGAIN = "run loka generate again"
BACK = "change it back, or remove the patch and run loka generate again"
_SHOWN = 6  # most names of items in a message


def built_in_problems(module: nn.Module, binding: Binding, after: bool = False) -> list[str]:
    """All differences between a module and the one that its forward was generated for, with names and advice.

    `after`: the module is already bound. Children that the generated forward calls only have to exist.
    """
    advice, script = BACK if after else AGAIN, binding.script()
    found = list(_changed(module, binding, script, after))
    if not found and all(below(module, path) is not None for path in binding.inlined):
        found = list(_changed_outside(module, binding, script))
    return [f"{problem}: {advice}" for problem in found]


def _changed(module: nn.Module, binding: Binding, script: str, after: bool) -> Iterator[str]:
    texts = ValueTexts(module, script)
    for reads in binding.reads:
        for path in reads.modules:
            child = below(module, path)
            if path in binding.inlined and in_wrapper(module, path):
                continue  # reported by `child_problems`
            if child is not None:
                yield from (_whose(path) + what for what in _differences(child, path, reads, texts, after))
            elif path not in binding.inlined:  # those are reported by `child_problems`
                yield f"has no child {path!r}, planned was a {reads.type}"
    for path in binding.called:
        if below(module, path) is None:
            yield f"has no child {path!r}, which the generated forward calls"


def _changed_outside(module: nn.Module, binding: Binding, script: str) -> Iterator[str]:
    if not binding.constants:
        return
    texts = ValueTexts(module, script)
    values = outside_values(_unbound(module), binding.inlined, binding.reads, script)
    for name, planned in binding.constants:
        found = texts.text(values[name]) if name in values else NoValue.ABSENT.value
        if found != planned:
            yield f"its forward reads {name} = {found}, planned was {planned}"


def lost_parameters(module: nn.Module, binding: Binding) -> Iterator[str]:
    """Planned parameters that a bound module no longer has, or has with another shape."""
    children: dict[str, nn.Module | None] = {}
    for name, shape in binding.shapes:
        path, _, own = name.rpartition(".")
        child = children[path] if path in children else children.setdefault(path, below(module, path))
        if child is None:
            continue  # reported by `child_problems`
        found = child._parameters.get(own)
        if found is None:  # a parametrised parameter is computed, also in the generated forward
            found = getattr(child, own, None)
        if not isinstance(found, torch.Tensor):
            yield f"has no parameter {name!r}, planned with shape {shape}: {BACK}"
        elif tuple(found.shape) != shape and not is_flat(found):
            yield f"{name} has shape {tuple(found.shape)}, planned was {shape}: {BACK}"
    if not binding.source_hash and "bias" not in dict(binding.shapes) and getattr(module, "bias", None) is not None:
        yield f"has a bias that the generated forward does not add: {BACK}"


def below(module: nn.Module, path: str) -> nn.Module | None:
    """The child at a dotted path, the module itself for ""; None if there is none."""
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        found = found._modules.get(part) if found is not None else None
    return found


def in_wrapper(module: nn.Module, path: str) -> bool:
    """True if the child at a dotted path, or a module on the way to it, is in a wrapper, such as torch.compile's."""
    parts = path.split(".")
    on_the_way = (below(module, ".".join(parts[: end + 1])) for end in range(len(parts)))
    return any(child is not None and inside(child) is not None for child in on_the_way)


def _unbound(module: nn.Module) -> nn.Module:
    """A view of a module with its own class, whose forward was traced."""
    view: nn.Module = object.__new__(plain_class(type(module)))
    view.__dict__ = vars(module)
    return view


def _differences(child: nn.Module, path: str, reads: Reads, texts: ValueTexts, after: bool) -> Iterator[str]:
    cls = type(child)
    if path and not same_type(cls, reads.type) and not same_type(cls := plain_class(cls), reads.type):
        yield f"is a {shown_type(cls)}, planned was a {reads.type}"
        return
    if reads.holds is not None and (held := held_by(child)) != reads.holds:
        yield _other_items(held, reads.holds)
    for name, planned in reads.values:
        if planned.startswith(SOURCE):
            if not after and method_text(child, name) != planned:
                yield f"has another method {name} than planned"
            continue
        value = attribute_of(child, name)
        if not _is_planned(value, planned, after) and (found := value_text(value, texts)) != planned:
            yield f"has {name} = {found}, planned was {_meant(planned)}"


def _is_planned(value: object, planned: str, after: bool) -> bool:
    """True if a value is as planned and this is clear without computing its text."""
    if planned == LIVE:  # the source hash leaves out only floats; once bound, any number is read
        return isinstance(value, float) or (after and type(value) is int)
    if planned == PRESENT:
        return isinstance(value, nn.Module)
    if isinstance(value, torch.Tensor) and planned.startswith(_A_TENSOR):
        return tensor_text(value) == planned or is_flat(value)
    return False


_A_TENSOR = tensor_text(torch.empty(())).partition("(")[0]


def _whose(path: str) -> str:
    return f"its child {path!r} " if path else ""


def _other_items(held: int | tuple[str, ...], planned: int | tuple[str, ...]) -> str:
    """Message about the difference between a container's items and the planned ones."""
    if isinstance(held, int) and isinstance(planned, int):
        return f"holds {held} item{'' if held == 1 else 's'}, planned {'was' if planned == 1 else 'were'} {planned}"
    now, then = (tuple(map(str, range(each))) if isinstance(each, int) else each for each in (held, planned))
    new, gone = ([name for name in one if name not in other] for one, other in ((now, then), (then, now)))
    said = [f"{word} {_listed(names)}" for word, names in (("also holds", new), ("lacks", gone)) if names]
    return " and ".join(said) or f"holds {_listed(now)} in this order, planned was {_listed(then)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


def _meant(planned: str) -> str:
    return "a float, read in each call" if planned == LIVE else planned
