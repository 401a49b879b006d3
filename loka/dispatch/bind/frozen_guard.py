"""Dynamo's guard on frozen weights, by which compiled calls quantize changed ones anew.

Guards run on the host before each call of what is compiled, also where that replays a CUDA graph, which reads the
buffers that are written then. This one always holds, so that nothing is compiled again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from loka.dispatch.dispatch_errors import FrozenWeightError
from loka.errors import Code
from loka.graph.capture.sources import parsed


def guard_weights(trace: Any, refresh: Callable[[Any], None]) -> None:
    """Adds the guard for the module that is `self` where Dynamo traces, whose frozen weights are of `weights` there.

    Where one has changed, the guard calls `refresh` with the module. Raises FrozenWeightError if the traced code has
    put other weights into the module.
    """
    from torch._dynamo.guards import install_guard

    module, weights = (
        trace.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker() for name in ("self", "weights")
    )
    bound, own = module.value, _source_name(module)
    output = trace._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    for path, weight in zip(bound.loka.frozen_paths, weights.items, strict=True):
        name = _source_name(weight)
        # A Parameter that modules share has the name by which Dynamo met it first.
        if not name.startswith((f"{own}.", f"{own}[")) and _named(name, output) is not parameter_at(bound, path):
            raise FrozenWeightError(
                f"{', '.join(bound.loka.sites)}: compiled code calls the module with other weights (functional_call) "
                "than were frozen: call it so outside of the compiled code, or apply the package with mode='train'",
                Code.FROZEN,
            )
    guarded = next((each.create_fn for each in output.guards if getattr(each.create_fn, "func", None) is _add), None)
    if guarded is None:  # one for all modules: calling it takes longer than comparing
        guarded = functools.partial(_add, [], refresh)
        install_guard(module.source.make_guard(guarded))
    guarded.args[0].append(weakref.ref(bound))


def _add(modules: list[weakref.ref[Any]], refresh: Callable[[Any], None], builder: Any, guard: Any) -> None:
    def is_fresh(scope: Any) -> bool:
        for each in modules:
            module: Any = each()
            for parameters, name, address, version in () if module is None else module.loka.frozen_marks:
                now = parameters.get(name)
                if now is None or now.data_ptr() != address or (version is not None and now._version != version):
                    refresh(module)
                    break
        return True

    builder.guard_manager.root.add_epilogue_lambda_guard(is_fresh, ["frozen weights are fresh"], None)


def _source_name(variable: Any) -> str:
    """Dynamo's name of where a value comes from; "" for what the traced code has computed."""
    name = getattr(variable.source, "name", "")
    return str(name() if callable(name) else name)  # a method before torch 2.12


def _named(name: str, output: Any) -> Any:
    """What a source of Dynamo's stands for among the arguments or globals of a compilation; None where it is not."""
    held: Any = output.global_scope if name.startswith("G[") else output.local_scope
    root, steps = parsed(f"L{name[1:]}")
    try:
        held = held[root]
        for kind, key in steps:
            held = getattr(held, str(key)) if kind == "." else held[key]
    except (AttributeError, LookupError, TypeError):
        return None
    return held


def parameter_at(module: Any, path: tuple[str, ...]) -> Any:
    """What is at a path of attributes of a module."""
    for name in path:
        module = getattr(module, name)
    return module
