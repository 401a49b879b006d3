"""Mods' changes to a live model before kernels are bound: applied once, and undone if binding fails."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from loka.dispatch.bind.bound import Bound
from loka.dispatch.bind.wrappers import ClosedWrapperError, unwrap
from loka.dispatch.dispatch_errors import BindError, NewModelWarning
from loka.errors import Code
from loka.graph.wrappers import unsharded_class
from loka.mods.adapt import AdaptError, is_adapted, undone_on_error
from loka.mods.adapt import adapt as carry_out
from loka.mods.adaptation import Adaptation
from loka.mods.registry import module_mod
from loka.mods.structure import unwrapped


def adapt(model: nn.Module, package: str, adaptations: Sequence[Adaptation]) -> None:
    """Apply the plan's mods to a model, in place; does nothing if they are already applied.

    Call it before creating the optimiser, DDP, FSDP or torch.compile, which keep references to replaced modules. Warns
    (NewModelWarning) that the changed model has to be trained. Raises BindError, with the model unchanged, with every
    reason why it differs from the planned one, and if it is wrapped, compiled, sharded or bound.
    """
    if not isinstance(model, nn.Module):
        raise BindError(f"{package}: adapt takes the model, an nn.Module, not {type(model).__name__}", Code.ARGUMENT)
    with adapting(model, package, adaptations, stacklevel=5):
        pass


@contextmanager
def adapting(model: nn.Module, package: str, adaptations: Sequence[Adaptation], stacklevel: int) -> Iterator[None]:
    """Context of `adapt`: undoes the changes if its body raises, otherwise warns after it."""
    if not adaptations or _is_done(model, package, adaptations):
        yield
        return
    problems = _problems(model)
    if problems:
        raise BindError(f"{package} cannot adapt this model, which is left as it was:", Code.NOT_ADAPTED, problems)
    with undone_on_error(model):
        try:
            carry_out(model, adaptations)
        except AdaptError as error:
            raise _refused(package, error) from error
        yield
    if not all(module_mod(adaptation.mod).exact for adaptation in adaptations):
        warnings.warn(_said(package, adaptations), NewModelWarning, stacklevel=stacklevel)


def _is_done(model: nn.Module, package: str, adaptations: Sequence[Adaptation]) -> bool:
    """True if the model inside any wrappers is adapted. Raises BindError if a wrapper cannot be opened."""
    try:
        with unwrapped(unwrap(model), _inside) as root:
            return is_adapted(root, adaptations)
    except ClosedWrapperError as error:
        raise BindError(f"{package}: the model is wrapped in {error}: adapt before wrapping", Code.WRAPPED) from error
    except AdaptError as error:
        closed = next((name for module in model.modules() if (name := _closed(module)) is not None), None)
        if closed is not None:
            raise BindError(
                f"{package}: a part of the model is wrapped in {closed}: adapt before wrapping", Code.WRAPPED
            ) from error
        raise _refused(package, error) from error


def _inside(module: nn.Module) -> nn.Module:
    """The module inside a wrapper that can be opened; any other module unchanged."""
    return module if _closed(module) is not None else unwrap(module)


def _closed(module: nn.Module) -> str | None:
    """Name of a wrapper around the module that cannot be opened, or None."""
    try:
        unwrap(module)
    except ClosedWrapperError as error:
        return str(error)
    return None


def _problems(model: nn.Module) -> list[str]:
    """Reasons why the model's modules cannot be changed now."""
    found: dict[str, None] = {}
    for module in model.modules():
        if _closed(module) is not None or unwrap(module) is not module:
            found[f"it is wrapped in {type(module).__name__}, or a part of it is: adapt before wrapping"] = None
        elif module._compiled_call_impl is not None:
            found["it, or a part of it, is compiled: adapt before compiling"] = None
        elif unsharded_class(type(module)) is not type(module):
            found["it is sharded by fully_shard: adapt before sharding"] = None
        elif isinstance(module, Bound):
            found["kernels are bound to it: take them off first (patch.remove()), or adapt a model of its own"] = None
    return list(found)


def _refused(package: str, error: AdaptError) -> BindError:
    headline = str(error).splitlines()[0]
    return BindError(f"{package}: {headline}", Code.NOT_ADAPTED, error.problems)


def _said(package: str, adaptations: Sequence[Adaptation]) -> str:
    """Text of the warning: what was changed, and what to do."""
    counts: Counter[str] = Counter()
    for adaptation in adaptations:
        counts[adaptation.mod] += len(adaptation.modules)
    changed = ", ".join(f"{mod} {count} module{'s' if count != 1 else ''}" for mod, count in counts.items())
    return (
        f"{package} changed the model ({changed}): it is another model now, and has to be trained. Make its optimizer "
        f"after this. A checkpoint of the model as it was goes through {package}.convert(state_dict) before it is "
        "loaded"
    )
