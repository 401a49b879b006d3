"""Binding of a generated package to a live model, all or nothing."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from loka.dispatch.bind.adapt_model import adapting
from loka.dispatch.bind.bind_warnings import warn_of_devices, warn_without_fp8
from loka.dispatch.bind.bound import Binding, CallCounters, derive, frozen
from loka.dispatch.bind.check_model import AGAIN, library_problems, match_modules
from loka.dispatch.bind.unplanned import planned_model_of, unplanned_products
from loka.dispatch.bind.wrappers import ClosedWrapperError, planned_inside, unwrap
from loka.dispatch.bound_state import BoundModule, bind, unbind
from loka.dispatch.dispatch_errors import BindError, LokaWarning
from loka.dispatch.patch import Patch
from loka.dispatch.static_scales import keep_from_ddp, names_in
from loka.errors import Code
from loka.kernels.flop_formulas import register_flop_formulas
from loka.mods.adaptation import Adaptation

MODES = ("train", "infer")


def apply(
    model: nn.Module,
    package: str,
    bindings: Sequence[Binding],
    target: str,
    mode: str = "train",
    adaptations: Sequence[Adaptation] = (),
    strict: bool = False,
) -> Patch:
    """Give the modules named in `bindings` their generated forwards, in place.

    The mods' changes to the model (`adaptations`) are applied first, unless `adapt` was called before.

    `package` is the generated package's name, for messages; `target` the device of its plan ("h100", "h200",
    "reference"). Mode "train" quantizes weights in every forward; "infer" quantizes them once, into buffers that are
    not in the state_dict. The model may be wrapped (DDP, torch.compile). GEMMs of modules and Parameters that the
    package's plan.json does not know stay in the model's own dtype, with a warning that names them and their share;
    `strict`: with a BindError.

    Raises BindError, with the model unchanged, with every reason why the package does not fit the model (children,
    order, types, constants or shapes differ from those it was generated from) or a planned kernel cannot run on the
    model's device (for example a missing library). Warns (LokaWarning) if the model's device has no FP8 or is not
    `target`, if the package has no FP8 in this mode, if the model has GEMMs that the plan does not know, and as `adapt`
    does.
    """
    root = _root(model, package)
    check_mode(package, mode)
    with adapting(model, package, adaptations, stacklevel=5):
        bound, unplanned = _bound(root, package, bindings, mode, strict)
    # The warning points to the caller of the generated package's apply.
    warn_of_devices(package, target, bound, stacklevel=3)
    warn_without_fp8(package, (part.counters for part in bound), stacklevel=3)
    if unplanned:
        warnings.warn(f"{package}: {unplanned}", LokaWarning, stacklevel=3)
    return Patch(root, package, bound)


def check_mode(package: str, mode: str) -> None:
    """Raise BindError for a mode that there is not."""
    if mode not in MODES:
        close = difflib.get_close_matches(str(mode), MODES, n=1, cutoff=0.3)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise BindError(f"{package}: mode must be 'train' or 'infer', not {mode!r}{hint}", Code.ARGUMENT)


def _bound(
    root: nn.Module, package: str, bindings: Sequence[Binding], mode: str, strict: bool
) -> tuple[tuple[BoundModule, ...], str]:
    """Bind the modules of the bindings, all or none; with what the plan does not know of the model, in words."""
    matches, problems = match_modules(root, bindings, mode)
    if problems:
        if path := planned_inside(root, bindings):
            inner = path if all(part.isidentifier() for part in path.split(".")) else f"get_submodule({path!r})"
            raise BindError(
                f"{package}: this {type(root).__name__} holds the model that was planned in its .{inner}, and has none "
                f"of the planned modules itself: apply to that, {package.rpartition('.')[2]}.apply(model.{inner})",
                Code.WRAPPED,
            )
        raise BindError(f"{package} does not fit this model, which is left as it was:", Code.OTHER_MODEL, problems)
    problems = library_problems(matches, mode)
    if problems:
        raise BindError(f"{package} cannot run on this machine; the model is left as it was:", Code.MACHINE, problems)
    planned = planned_model_of(package)
    if planned is None and strict:
        raise BindError(f"{package}: strict needs a plan.json of this LoKA beside the package: {AGAIN}", Code.UNPLANNED)
    unplanned = unplanned_products(root, planned) if planned is not None else ""
    if unplanned and strict:
        raise BindError(
            f"{package} does not know all of this model, which is left as it was:", Code.UNPLANNED, [unplanned]
        )
    # Do everything that can fail before the first module changes.
    derived = [(match, derive(match.binding.bound, type(match.module), mode == "infer")) for match in matches]
    prepared = [(match, bound_class, frozen(bound_class, match.module)) for match, bound_class in derived]
    bound = []
    try:
        for match, bound_class, quantized in prepared:
            counters = CallCounters(match.sites, match.binding, mode)
            bind(match.module, bound_class, counters, quantized)
            bound.append(BoundModule(match.name, match.module, counters))
    except BaseException:  # including an interrupt: never leave the model half bound
        for match in matches:
            unbind(match.module)
        raise
    register_flop_formulas()
    keep_from_ddp(root, [name for match in matches for name in names_in(match.name, match.binding.bound.loka_known)])
    return tuple(bound), unplanned


def _root(model: Any, package: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise BindError(f"{package}: apply takes the model, an nn.Module, not {type(model).__name__}", Code.ARGUMENT)
    try:
        return unwrap(model)
    except ClosedWrapperError as error:
        raise BindError(f"{package}: the model is wrapped in {error}: apply before wrapping", Code.WRAPPED) from None
