"""What a run or a capture of a module could change outside of it, and puts back."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LOGS = ("torch._dynamo", "torch._subclasses.fake_tensor", "torch.__trace", "torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Attributes of all modules in one, their modes among them, and random states; restored afterwards."""
    held = [(child, dict(vars(child))) for child in module.modules()]
    with _random_states():
        try:
            yield
        finally:
            for child, attributes in held:
                vars(child).clear()
                vars(child).update(attributes)


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Values of buffers, and random states; restored afterwards. Attributes stay: a first call may fill a cache."""
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with _random_states(), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in values:
                buffer.copy_(value)


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Everything that a capture could change outside of it, restored: attributes, random states, settings, warnings."""
    counters = torch._dynamo.utils.counters
    counted = {name: counter.copy() for name, counter in counters.items()}
    logs = {log: (log.disabled, log.handlers) for log in map(logging.getLogger, _LOGS)}
    imported = getattr(torch._dynamo.symbolic_convert, "_import_module", None)
    if imported is not None:
        imported.cache_clear()  # by name: a file that is imported again is another module
    try:
        with unchanged(module), warnings.catch_warnings(), torch.compiler.set_stance("default"), _settings():
            warnings.simplefilter("ignore")
            for log in logs:
                log.disabled, log.handlers = True, []  # torch makes records, with stacks, for a log that has handlers
            yield
    finally:
        for cached in vars(torch.fx.experimental.symbolic_shapes.ShapeEnv).values():
            if hasattr(cached, "cache_clear"):  # of the process, and would keep a capture's symbols
                cached.cache_clear()
        for log, (disabled, handlers) in logs.items():
            log.disabled, log.handlers = disabled, handlers
        counters.clear()
        counters.update(counted)


def _settings() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings during a capture: no sizes are remembered, equal ones are not taken for one."""
    stack = contextlib.ExitStack()
    wanted: dict[str, Any] = {
        "automatic_dynamic_shapes": False, "assume_static_by_default": True, "specialize_float": True,
        "allow_rnn": True, "suppress_errors": False, "side_effect_replay_policy": "error",
        "fake_tensor_cache_enabled": False,  # it is the process's, and would keep each capture's symbols
        "run_gc_after_compile": False,  # up to 50 ms each, and Python collects by itself
    }  # fmt: skip
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    stack.enter_context(torch._dynamo.config.patch(**known))
    if torch.backends.opt_einsum.enabled:
        stack.enter_context(torch.backends.opt_einsum.flags(enabled=False))  # an einsum is one operation
    stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    return stack
