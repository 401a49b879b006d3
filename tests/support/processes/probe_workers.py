"""What each of three processes runs in the tests of ranks; results go to one file a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.errors import InputError
from loka.graph.sites.discover import find_sites
from loka.model.build_model import BuiltModel
from loka.probe.capture.live_sites import find_live
from loka.probe.stats.merge import merge_across
from tests.support.learned_stats import site_of
from tests.support.models import probe_models as models
from tests.support.processes.ranks import run_rank

WORLD = 3
ROWS = (40, 200, 7)
SHAPES = (("narrow", 24, 16), ("wide", 600, 8))


def start(rank, folder, policy, names):
    """Run the functions of these names as one rank."""
    run_rank(globals(), names, rank, WORLD, folder, lambda: (folder, policy))


def rows_of(rank, k, n):
    """A rank's rows of an input and an output gradient, shifted from the other ranks'."""
    generator = torch.Generator().manual_seed(rank + k)
    x = torch.randn(ROWS[rank], k, generator=generator) * (rank + 1) + 10.0 * rank
    return x, torch.randn(ROWS[rank], n, generator=generator) * 1e-4 - 1e-3 * rank


def called(name, rank, k, n):
    """What one call of a rank gives."""
    x, grad = rows_of(rank, k, n)
    return site_of([x], [grad], name=name)


def merged(rank, folder, policy):
    """Unequal, shifted shards; a site that rank 1 alone has seen; one that nobody has."""
    stats = [called(name, rank, k, n) for name, k, n in SHAPES]
    once = called("once", 1, 24, 16)
    empty = replace(once, input=None, grad_output=None, joint=None)
    stats += [once if rank == 1 else empty, replace(empty, name="never")]
    return stats, merge_across(tuple(stats), dist.group.WORLD)


def disagreeing(rank, folder, policy):
    """Rank 2 has another site."""
    site = called("other" if rank == 2 else "same", rank, 24, 16)
    try:
        merge_across((site,), dist.group.WORLD)
    except InputError as error:
        return str(error)
    return "no error"


def batches_of(rank):
    """Three steps of one rank."""
    return models.make_batches(3, 8 + rank, 12, seed=rank)


def ddp(rank, folder, policy):
    """A model under DDP, merged over the ranks; rank 0 writes the file."""
    model = DistributedDataParallel(models.build_plain())
    path = Path(folder) / "merged.safetensors"
    with loka.Probe(model, policy, every=1, path=path, save_every=2, group=dist.group.WORLD) as probe:
        models.train(model, batches_of(rank), probe, lr=0.0)
        recorded = probe.recorded()
    return recorded.stats, recorded.profile.samples, sorted(each.name for each in Path(folder).glob("merged*"))


def compiled(rank, folder, policy):
    """torch.compile around DDP, and DDP around torch.compile."""
    results = []
    for around in (True, False):
        model = models.build_plain()
        model = (
            torch.compile(DistributedDataParallel(model), backend="eager")
            if around
            else DistributedDataParallel(torch.compile(model, backend="eager"))
        )
        with loka.Probe(model, policy, every=1) as probe:
            models.train(model, batches_of(rank), probe, lr=0.0)
            results.append(tuple((site.input.calls, site.grad_output.calls) for site in probe.stats()))
    return results


def fully_sharded(rank, folder, policy):
    """FSDP2: the statistics of real steps, the saved file, those of a model under DDP; and what is refused."""
    mesh = init_device_mesh("cpu", (WORLD,))
    path, found, logged = Path(folder) / "sharded.safetensors", {}, []

    def sharded(**options):
        model = models.build_plain()
        fully_shard(model.hidden, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def log(step, figures):
        logged.append(sorted({name.split("/")[1] for name in figures}))

    for name, wrap in (
        ("ddp", lambda: DistributedDataParallel(models.build_plain())),
        ("fsdp", sharded),
        ("kept", lambda: sharded(reshard_after_forward=False)),
    ):
        model = wrap()
        with loka.Probe(model, policy, every=2, path=path, save_every=2, group=dist.group.WORLD, log=log) as probe:
            models.train(model, models.make_batches(4, 8 + rank, 12, seed=rank), probe, lr=0.0)
            found[name] = probe.stats()
    matrices = models.Matrices()
    sites = find_sites(BuiltModel(matrices, (torch.randn(4, 12),), {}, 4)).sites
    fully_shard(matrices, mesh=mesh)
    parallel, messages = models.build_plain(), []
    linear = next(module for module in parallel.modules() if isinstance(module, torch.nn.Linear))
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    for refused in (
        lambda: loka.Probe(sharded(), policy),
        lambda: find_live(matrices, sites),
        lambda: loka.Probe(parallel, policy),
    ):
        with pytest.raises(InputError) as caught:
            refused()
        messages.append(str(caught.value))
    return found, logged, messages
