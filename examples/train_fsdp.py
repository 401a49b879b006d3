"""Trains the ranker in FP8 with FSDP2, each block compiled and sharded, in bfloat16 with float32 parameters.

    loka generate ranker.yaml
    torchrun --nproc-per-node 2 train_fsdp.py

Weights are gathered in FP8 where one FP8 copy of them is read. It runs on GPUs where there are any, otherwise on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ranker
from generated import clicks as fp8


def main(steps: int) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)  # every rank draws the whole model, and keeps its shards
    model = ranker.build().to(device)
    patch = fp8.apply(model)  # before fully_shard
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # each is bound as a whole, and so a unit as a whole
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    gathering = patch.gather_fp8()  # on every rank, before the first forward
    if dist.get_rank() == 0:
        print(gathering)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=rank), steps)
    for step, ((dense, ids), clicks) in enumerate(data):
        loss = ranker.loss(model(dense.to(device), ids.to(device)), clicks.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            patch.verify()  # on every rank
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if rank == 0:
                print(f"step {step:3}: loss {mean.item():.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "ranker.pt")  # whole tensors under the plain model's keys
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
