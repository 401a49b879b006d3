"""A guard in DDP and FSDP2, for `dispatch_workers`: a fault on one rank, and the same decisions on both."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import loka
from tests.support import dispatch_sample as sample
from tests.support import planted_faults
from tests.support.models import dispatch_models as models


def guard_ddp(rank):
    """DDP around the model; batches are accumulated in no_sync, amid which the guard steps."""

    def wrapped(model):
        parallel = DistributedDataParallel(model)
        return parallel, parallel.no_sync

    return _guarded(rank, wrapped)


def guard_fsdp(rank):
    """Layers and the rest of the model as FSDP2 units."""
    mesh = init_device_mesh("cpu", (2,))

    def wrapped(model):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), None

    return _guarded(rank, wrapped)


def _loss(model, x):
    return model(x).square().mean()


def _guarded(rank, wrapped):
    found = {}
    plain, _ = _trained(rank, wrapped, guarded=False)
    state, guard = _trained(rank, wrapped, guarded=True)
    found["same"] = [torch.equal(state[name], plain[name]) for name in plain]
    found["healthy"] = guard.events
    patch = guard._patch
    number = next(number for number, label in patch._labels() if label == ("layers.1.down", "fprop"))
    found["fallen"] = []
    with pytest.MonkeyPatch.context() as faults:
        if rank == 1:
            planted_faults.plant(faults, number, "wgrad is infinite")
        guard.step(_rows(rank, 0))
        found["fallen"].append(guard.fallen)
    found["state"] = guard.state_dict()
    found["resumed"] = _resumed(rank, wrapped, found["state"])
    for step in range(4):
        guard.step(_rows(rank, step))
    found["fallen"].append(guard.fallen)
    found["events"] = [(event.action, event.module, event.step) for event in guard.events]
    _loss(guard._model, _rows(rank, 0)).backward()
    patch.verify(backward=False)
    guard.step(_rows(rank, 1))
    found["report"] = guard.report
    rows = _rows(rank, 1)
    if rank == 1:
        guard._model.head.register_forward_hook(lambda module, args, out: out * torch.nan)
    (event,) = loka.Guard(guard._model, patch, loss=_loss, every=1, hooks=True).step(rows)
    found["nan"] = (event.action, event.module, event.step, event.reason)
    layer, classes = guard._model.layers[0], []
    for _ in range(2):
        patch.keep("layers.0.*")
        classes.append(type(layer))
        patch.restore("layers.0.*")
        classes.append(type(layer))
    found["classes"] = len(set(classes))
    return found


def _resumed(rank, wrapped, state):
    """What had fallen in a new job, before and after its steps; its events; the runs of a hook of the user."""
    model = models.Blocks()
    patch = sample.apply(model, sample.BLOCKS)
    parallel, _ = wrapped(model)
    counted = []
    for module in (model.head, model.layers[0]):
        module.register_forward_hook(lambda module, args, out: counted.append(module))
        module.register_full_backward_hook(lambda module, grads, out: counted.append(module))
    guard = loka.Guard(parallel, patch, loss=_loss, every=1, return_after=4)
    guard.load_state_dict(state)
    fallen = [guard.fallen]
    for step in range(4):
        guard.step(_rows(rank, step))
    fallen.append(guard.fallen)
    return fallen, [(event.action, event.module, event.step) for event in guard.events], len(counted)


def _trained(rank, wrapped, guarded):
    """The state after four steps with two batches each, and the guard."""
    model = models.Blocks()
    patch = sample.apply(model, sample.BLOCKS)
    model, no_sync = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = loka.Guard(model, patch, loss=_loss, every=1, return_after=4) if guarded else None
    for step in range(4):
        optimizer.zero_grad()
        if no_sync is not None:
            with no_sync():
                _loss(model, _rows(rank, step + 50)).backward()
        if guard is not None:
            guard.step(_rows(rank, step))
        _loss(model, _rows(rank, step)).backward()
        optimizer.step()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()
    }, guard


def _rows(rank, step):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + rank))
