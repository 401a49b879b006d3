"""What each of two processes runs in the tests of TorchRec's DLRM_DCN under DistributedModelParallel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.models import torchrec_dlrm as models

WORLD = 2


BINDS = ("never", "before", "after", "exchanged")


def start(rank, folder):
    """Train the model bound in each of the ways; saves what `trained` gives, by way."""
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save({bind: trained(rank, bind) for bind in BINDS}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # threads of TorchRec can abort a process that ends otherwise


def trained(rank, bind):
    """Losses of five steps, the names of bound sites, and weights; bound never, before or after sharding.

    "exchanged": bound before, with the exchanges of the policy of that name.
    """
    model, patch = models.dlrm_dcn(), None
    codecs, package = None, importlib.import_module("exchanged" if bind == "exchanged" else "dlrm_dcn")
    if bind == "exchanged":
        codecs = get_qcomm_codecs_registry(package.qcomms(), device=torch.device("cpu"))
    if bind in ("before", "exchanged"):
        patch = package.apply(models.DensePart(model))
    parallel = sharded(model, codecs)
    if bind == "after":
        patch = package.apply(models.DensePart(parallel.module))
    if patch is not None:
        patch.verify_ranks()
    optimizer = torch.optim.SGD(dict(in_backward_optimizer_filter(parallel.named_parameters())).values(), lr=0.05)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(5):
        ids = torch.randint(models.ROWS, (len(models.NAMES), 64), generator=generator)
        dense = torch.randn(64, models.DENSE, generator=generator)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        logits = parallel(dense, KeyedJaggedTensor(keys=models.NAMES, values=ids.flatten(), lengths=lengths))
        loss = F.binary_cross_entropy_with_logits(logits.squeeze(1), (ids[0] % 2).float())
        parallel.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if patch is not None:
        patch.verify()
    weights = [each.detach().clone() for each in models.DensePart(parallel.module).parameters()]
    return losses, patch and patch.sites, weights


def sharded(model, codecs=None):
    """The model with two tables by rows and two whole, one on each rank; `codecs` are those of their exchanges."""
    tables = model.sparse_arch.embedding_bag_collection
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    ways = {
        f"table_{name}": row_wise() if index % 2 else table_wise(rank=index // 2)
        for index, name in enumerate(models.NAMES)
    }
    plan = construct_module_sharding_plan(
        tables, ways, sharder=sharder, local_size=WORLD, world_size=WORLD, device_type="cpu"
    )
    plans = ShardingPlan({"sparse_arch.embedding_bag_collection": plan})
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plans, sharders=[sharder])
