"""What torch reads of models, once for all that are alike: it takes most of the time of planning and of `apply`.

For tests of what is made of it. Those of what is read, and of what `apply` refuses, are in tests/graph and
tests/dispatch, which read every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from loka.graph import fingerprint
from loka.graph.fake_module import device_of, is_simple, likeness
from loka.graph.ir import ForwardIR, Refused
from loka.graph.sites import forwards
from loka.graph.sites.forwards import Forwards
from loka.graph.source import has_hooks
from loka.graph.trace.tracer import Tracer
from loka.graph.wrappers import own_class
from loka.model.build_model import BuiltModel

_RUN: dict[object, Any] = {}  # what a forward runs in both modes: its fingerprint, and what that is compared with
_READ: dict[object, Forwards] = {}
_TRACED: dict[object, dict[object, ForwardIR | Refused]] = {}  # by the check, and by the forwards of the classes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def read_once() -> Iterator[None]:
    """Models that are alike are read, traced, and compared with what was planned, by the first test that has one."""
    both_modes, read = fingerprint._both_modes, forwards._Model.forwards
    trace = Tracer.__call__

    def modes(module: nn.Module, inlined: Any, call: Any, dtype: Any, shapes: Any = None) -> Any:
        alike = None if any(map(has_hooks, module.modules())) else model_likeness(module)
        own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(remove_duplicate=False)}
        if alike is None or not (shapes or {}).items() <= own.items():  # its Parameters may be in pieces
            return both_modes(module, inlined, call, dtype, shapes)
        given = (tuple(inlined), call.inputs, call.results, dtype, device_of(module))
        key = (_in_any_mode(alike), *given)
        if key not in _RUN:
            _RUN[key] = both_modes(module, inlined, call, dtype, shapes)
        return _RUN[key]

    def known(model: Any, runs_on: str, samples: tuple[int, ...], notes: tuple[str, ...]) -> Forwards:
        alike = None if runs_on == "real" else _likeness_with_inputs(model.built)
        if alike is None:
            return read(model, runs_on, samples, notes)
        key = (alike, runs_on, samples, notes)
        if key not in _READ:
            _READ[key] = read(model, runs_on, samples, notes)
        return _READ[key]

    def traced(tracer: Tracer, scope: Any) -> ForwardIR | Refused:
        tracer._traced = _TRACED.setdefault((tracer.quick, _forwards(tracer.model)), {})  # which all share
        return trace(tracer, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "__call__", traced)
        patch.setattr(fingerprint, "_both_modes", modes)
        patch.setattr(forwards._Model, "forwards", known)
        yield


def _forwards(module: nn.Module) -> tuple[object, ...]:
    """The forwards of the classes of a module, which a test may have replaced."""
    return tuple({own_class(type(each)): own_class(type(each)).forward for each in module.modules()}.values())


def model_likeness(module: nn.Module) -> object | None:
    """Key that is equal for models with the same classes, forwards and sizes; None where that cannot be decided."""
    alike = likeness(module)
    return None if alike is None else (alike, _forwards(module))


def _in_any_mode(alike: Any) -> object:
    """The key of a model without what mode its modules are in, which is set for each reading."""
    (parts, shared), forwards_ = alike
    return tuple((name, kind, *rest) for name, kind, _, *rest in parts), shared, forwards_


def _likeness_with_inputs(built: BuiltModel) -> object | None:
    """Key of a model and of its example inputs but for their values; None where one of them has none."""
    if any(getattr(module, hooks) for module in built.module.modules() for hooks in _HOOKS):
        return None
    leaves, structure = tree_flatten((built.args, built.kwargs))
    if not all(isinstance(leaf, Tensor) or is_simple(leaf) for leaf in leaves):
        return None
    forms = [
        (type(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor) and not leaf.is_sparse
        else repr(leaf)
        for leaf in leaves
    ]
    alike = model_likeness(built.module)
    return None if alike is None else (alike, str(structure), tuple(forms), built.batch_size)
