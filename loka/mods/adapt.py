"""Applies adaptations to a live model, and converts checkpoints. Imports only torch and the standard library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from loka.errors import Code, InputError
from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.registry import ModKind, module_mod, names_of

SHOWN = 20  # problems printed in one message; the rest is counted


class AdaptError(InputError):
    """Raised for a model that adaptations do not fit. `problems` has one line per reason; the model is unchanged."""

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(_listed(headline, self.problems), Code.NOT_ADAPTED)


class ConvertError(InputError):
    """Raised for a checkpoint that cannot be converted without loss. `lost` names what would be lost, with reasons."""

    def __init__(self, headline: str, lost: Sequence[Unchanged]) -> None:
        self.lost = tuple(lost)
        super().__init__(_listed(headline, [f"{each.name}: {each.reason}" for each in lost]), Code.NOT_ADAPTED)


def adapt(model: nn.Module, adaptations: Sequence[Adaptation]) -> None:
    """Apply adaptations to the modules of a model in place, one after the other.

    Everything is checked, and the model is unchanged if anything is wrong. A model that is adapted already stays
    unchanged. Create the optimizer, DDP and FSDP after this, or they would keep Parameters that are removed.

    Raises AdaptError where a module is missing or is not the one the adaptations were made for, or where only some
    modules are changed already.
    """
    if is_adapted(model, adaptations):
        return
    problems: list[str] = []
    with undone_on_error(model):
        for adaptation in adaptations:
            mod = module_mod(adaptation.mod)
            wrong = [(name, mod.unsupported_reason(model, name, adaptation)) for name in adaptation.modules]
            problems += [_problem(name, reason, adaptation) for name, reason in wrong if reason is not None]
            if not problems:
                mod.change(model, adaptation)
        if problems:
            raise AdaptError(_OTHER_MODEL, problems)


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager: gives the model's modules back their children and Parameters if its body raises."""
    held = [part for module in model.modules() for part in (module._modules, module._parameters)]
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = [(part, dict(part)) for part in held]
    try:
        yield
    except BaseException:  # including an interrupt: never leave the model half changed
        for part, copy in saved:
            part.clear()
            part.update(copy)
        raise


_OTHER_MODEL = "this is not the model that was planned; nothing was changed. Plan and generate anew for this one:"


def is_adapted(model: nn.Module, adaptations: Sequence[Adaptation]) -> bool:
    """True if all adaptations have been applied to a model, False if none has.

    Raises AdaptError where a module is missing, or where only some modules are changed.
    """
    by_name: dict[str, list[Adaptation]] = {}
    for adaptation in adaptations:
        _check_known(adaptation)
        for name in adaptation.modules:
            by_name.setdefault(name, []).append(adaptation)
    missing = [_problem(name, "is not there", found[0]) for name, found in by_name.items() if not _has(model, name)]
    if missing:
        hint = _wrapper(model, by_name)
        raise AdaptError(f"modules are missing{hint}; nothing was changed:", missing)
    done = {name: _is_done(model, name, found) for name, found in by_name.items()}
    if all(done.values()):
        return True
    first = [
        (name, module_mod(found[0].mod).unsupported_reason(model, name, found[0])) for name, found in by_name.items()
    ]
    wrong = [_problem(name, why, by_name[name][0]) for name, why in first if why is not None and not done[name]]
    if wrong:
        raise AdaptError(_OTHER_MODEL, wrong)
    changed = [_problem(name, "is changed already", by_name[name][0]) for name, value in done.items() if value]
    if changed:
        raise AdaptError(
            "some modules are changed already, and others are not; nothing was changed. Adapt a freshly built model:",
            changed,
        )
    return False


def convert(
    state: Mapping[str, Tensor], adaptations: Sequence[Adaptation], drop: bool = False
) -> OrderedDict[str, Tensor]:
    """Convert a state_dict of the original model to one for the adapted model; `state` itself is not changed.

    Biases are folded where that is exact; zero biases and a norm's weight of ones are dropped. A state_dict of the
    adapted model is returned unchanged. Raises ConvertError, with everything concerned, if anything else would be lost,
    unless `drop`: then it is left out, and the model has to be retrained. Raises InputError where `state` is no
    state_dict of either model: Parameters are missing, or have other names or sizes, or are no tensors.
    """
    _check_state(state, adaptations)
    made: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:  # load_state_dict reads the versions of modules from it
        made._metadata = metadata  # type: ignore[attr-defined]
    lost: list[Unchanged] = []
    for adaptation in adaptations:
        _check_known(adaptation)
        try:
            lost += module_mod(adaptation.mod).convert(made, adaptation)
        except KeyError as error:
            raise InputError(
                f"the checkpoint has no {error.args[0]!r}, which {adaptation.mod} needs; give the whole state_dict of "
                "the model, without prefixes such as 'module.'"
            ) from error
    if lost and not drop:
        raise ConvertError(
            "the checkpoint has values that the adapted model has no place for; drop=True leaves them out, and what "
            "comes back has to be trained further:",
            lost,
        )
    return made


def _check_state(state: Mapping[str, Tensor], adaptations: Sequence[Adaptation]) -> None:
    """Raise InputError unless `state` is a mapping with tensors for the adapted modules, without a wrapper's prefix."""
    if not isinstance(state, Mapping):
        raise InputError(f"convert takes a state_dict, not {type(state).__name__}: give model.state_dict()")
    names = dict.fromkeys(name for adaptation in adaptations for name in adaptation.modules)
    for key in (_key(name, part) for name in names for part in ("weight", "bias")):
        prefix = next((prefix for prefix in ("module.", "_orig_mod.") if f"{prefix}{key}" in state), None)
        if prefix is not None:
            raise InputError(
                f"the checkpoint has {prefix + key!r}, which the model calls {key!r}: it is of a wrapped model; take "
                f"{prefix!r} off its names"
            )
        if not isinstance(state.get(key, _NOTHING), Tensor):
            raise InputError(f"the checkpoint's {key!r} is of type {type(state[key]).__name__}, and no tensor")


_NOTHING = Tensor()


def _key(module: str, part: str) -> str:
    return f"{module}.{part}" if module else part


def _is_done(model: nn.Module, name: str, adaptations: Sequence[Adaptation]) -> bool:
    last = adaptations[-1]
    return all(module_mod(each.mod).is_done(model, name, each, each is last) for each in adaptations)


def _check_known(adaptation: Adaptation) -> None:
    names = names_of(ModKind.MODULES)
    if adaptation.mod not in names:
        listed = ", ".join(names)
        raise InputError(f"no mod is called {adaptation.mod!r}; this version of LoKA has {listed}: generate anew")


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _wrapper(model: nn.Module, names: Mapping[str, object]) -> str:
    """A hint if the model is wrapped, or held by a module of the user's own."""
    for prefix, module in model.named_modules():
        if prefix and all(_has(module, name) for name in names):
            return f": the model is wrapped in a {type(model).__name__}, adapt what it wraps ('.{prefix}')"
    return ""


def _problem(name: str, reason: str, adaptation: Adaptation) -> str:
    return f"{name} {reason} ({adaptation.mod})"


def _listed(headline: str, problems: Sequence[str]) -> str:
    lines = [headline, *(f"  {problem}" for problem in problems[:SHOWN])]
    if len(problems) > SHOWN:
        lines.append(f"  ... and {len(problems) - SHOWN} more (the exception has them all)")
    return "\n".join(lines)
