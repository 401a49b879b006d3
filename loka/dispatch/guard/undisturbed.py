"""Running a model beside its training: nothing that training reads is changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context in which a model may run: eagerly, with gradients; buffers and random numbers are as before after it.

    Each such context starts from the same random numbers, so that dropout is equal in all of them.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device for device in devices if device.index is not None]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):  # around a part of the model
                stack.enter_context(module.no_sync())
        try:
            torch.set_autocast_cache_enabled(False)  # casts of weights would be those of another graph
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(value)
