"""Trains a Wukong under TorchRec's DistributedModelParallel, with its pipeline, and the dense part in FP8.

    loka generate ranker.yaml
    torchrun --nproc-per-node 2 train.py

Tables are sharded in turn by tables and by rows. It runs on GPUs where there are any, otherwise on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import ranker
from generated import torchrec_dense as fp8


def shard(model: ranker.Ranker, device: torch.device) -> DistributedModelParallel:
    """The model with its tables on all ranks, which exchange embeddings and their gradients as the policy says."""
    world = dist.get_world_size()
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.05})
    codecs = get_qcomm_codecs_registry(fp8.qcomms(), device=device)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    tables = {
        f"table_{name}": row_wise() if index % 2 else table_wise(rank=index // 2 % world)
        for index, name in enumerate(ranker.NAMES)
    }
    plan = construct_module_sharding_plan(
        model.embeddings, tables, sharder=sharder, local_size=world, world_size=world, device_type=device.type
    )
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({"embeddings": plan}), sharders=[sharder])


def main(steps: int, bind: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = ranker.Ranker()
    patch = fp8.apply(model.dense_part) if bind == "before" else None
    parallel = shard(model, device)  # DDP around what is not sharded
    if bind == "after":
        patch = fp8.apply(parallel.module.dense_part)
    if patch is not None:
        patch.verify_ranks()  # on every rank: all of them have the same package
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    optimizer = CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, lambda weights: torch.optim.Adam(weights, lr=1e-3))]
    )
    pipeline = TrainPipelineSparseDist(parallel, optimizer, device)

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=rank), steps)
    for step in range(steps):
        mean = pipeline.progress(data) / dist.get_world_size()  # of a whole training step
        if step == 0 and patch is not None:
            patch.verify()  # on every rank
        if step % 10 == 0:
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3}: loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bind", choices=["before", "after", "never"], default="before", help="apply around sharding")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.bind)
