"""Checkpoints of sharded models, for `gather_workers`: saved by all ranks, loaded by all, two and one."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import loka
from tests.support.models import sharded_models as models

KINDS = {"unbound": (False, False), "bound": (True, False), "gathered in FP8": (True, True)}  # (bound, gather_fp8)


class Job:
    """A tower whose blocks have a recipe each, its Adam and its guard; on the ranks of a mesh, or on this one alone."""

    def __init__(self, kind, mesh, loaded=None, guarded=False):
        bound, fp8 = KINDS[kind]
        self.mesh = mesh
        self.model = models.tower_of_recipes()
        self.patch = importlib.import_module("recipes").apply(self.model) if bound else None
        for unit in (*self.model.blocks, self.model) if mesh is not None else ():
            fully_shard(unit, mesh=mesh)
        self.report = str(self.patch.gather_fp8()) if fp8 else ""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.guard = loka.Guard(self.model, self.patch, loss=loss, every=2) if guarded else None
        self.losses = []
        if loaded is not None:
            self.load(loaded)

    def train(self, rank, steps):
        """So many steps more."""
        for step in range(len(self.losses), len(self.losses) + steps):
            if self.guard is not None:
                self.guard.step(batch(rank, step))
            self.optimizer.zero_grad()
            found = loss(self.model, batch(rank, step))
            found.backward()
            self.optimizer.step()
            self.losses.append(found.item())

    def state(self):
        """What a training script saves, and loads into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, **({} if self.guard is None else {"guard": self.guard})}

    def load(self, path):
        """Go on from a checkpoint."""
        state, group = self.state(), None if self.mesh is None else self.mesh.get_group()
        dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self):
        """Parameters and moments by name, each whole."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        tensors = {name: value for name, value in (model | optimizer).items() if isinstance(value, torch.Tensor)}
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in tensors.items()
        }

    def result(self):
        """The forward of rows that are the same on all ranks."""
        with torch.no_grad():
            return self.model(batch(0, 99))


def batch(rank, step):
    """A rank's rows of a step."""
    generator = torch.Generator("cpu").manual_seed(100 * rank + step)
    return torch.randn(16, models.WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


def loss(model, x):
    return model(x).float().square().mean()


def differences(one, other):
    """Names of the values that are not the same to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def resumed(rank, pairs, folder):
    """Two steps on all ranks, a checkpoint, two more; and another job, which goes on from the checkpoint."""
    everyone, found = init_device_mesh(pairs.device_type, (dist.get_world_size(),)), {}
    for kind in KINDS:
        job = Job(kind, everyone, guarded=kind == "bound")
        job.train(rank, 2)
        dcp.save(job.state(), checkpoint_id=folder / f"checkpoint {kind}")
        saved = {"whole": job.whole(), "result": job.result()}
        torch.save(saved, folder / f"{kind} {rank}.pt")
        job.train(rank, 2)
        again = Job(kind, everyone, folder / f"checkpoint {kind}", guarded=kind == "bound")
        again.losses = job.losses[:2]
        again.train(rank, 2)
        apart = differences(job.whole(), again.whole())
        guards = [each.guard and each.guard.state_dict() for each in (job, again)]
        trained = len(differences(job.whole(), saved["whole"]))
        found[kind] = apart, job.losses == again.losses, guards[0] == guards[1], trained, job.report
    return found


def loaded(rank, pairs, folder):
    """The checkpoints by two ranks and by one, in models of other kinds: what differs, and the result of a forward."""
    found = {}
    for mesh, kind, source in (
        (pairs["shard"], "unbound", "gathered in FP8"),
        (pairs["shard"], "gathered in FP8", "bound"),
        (pairs["shard"], "bound", "unbound"),
        (None, "unbound", "bound"),
        (None, "bound", "gathered in FP8"),
    ):
        saved = torch.load(folder / f"{source} {rank}.pt")
        job = Job(kind, mesh, folder / f"checkpoint {source}")
        apart = differences(job.whole(), saved["whole"])
        found[mesh is not None, source, kind] = apart, torch.equal(job.result(), saved["result"])
    return found


def assert_loaded(found):
    """What `loaded` found on one rank: every value is as saved, and so is the forward, of the same numbers."""
    assert len(found) == 5
    for (_, source, kind), (apart, same) in found.items():
        assert apart == [], (source, kind)
        assert same is ((source == "unbound") is (kind == "unbound")), (source, kind)
