"""Trains the ranker in FP8 with a guard, in DDP or FSDP2, and goes on from its checkpoint, as a job that was stopped.

    loka generate ranker.yaml
    torchrun --nproc-per-node 2 train_guarded.py
    torchrun --nproc-per-node 2 train_guarded.py --fsdp --resume

It runs on GPUs where there are any, otherwise on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import loka
import ranker
from generated import clicks as fp8

CHECKPOINT = Path("guarded.pt")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main(steps: int, every: int, fsdp: bool, resume: bool) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = ranker.build().to(device)
    patch = fp8.apply(model)  # before fully_shard
    if fsdp:
        for block in model.blocks:
            fully_shard(block)
        parallel = fully_shard(model)
    else:
        parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def loss(model, batch):
        inputs, clicks = batch
        return ranker.loss(model(*inputs), clicks)

    guard = loka.Guard(parallel, patch, loss=loss, every=every)
    start = 0
    if resume:
        saved = torch.load(CHECKPOINT, weights_only=True)
        set_state_dict(
            parallel, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=WHOLE
        )
        guard.load_state_dict(saved["guard"])  # the same on all ranks; what fell back falls back at once
        start = saved["step"]

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=rank), start, start + steps)
    for step, ((dense, ids), clicks) in enumerate(data, start):
        batch = (dense.to(device), ids.to(device)), clicks.to(device)
        guard.step(batch)  # on every rank; a finding is logged
        optimizer.zero_grad()
        found = loss(parallel, batch)
        found.backward()
        optimizer.step()
        if step == start:
            patch.verify()  # on every rank
        if step % 10 == 0:
            dist.all_reduce(mean := found.detach() / dist.get_world_size())
            if rank == 0:
                print(f"step {step:3}: loss {mean.item():.4f}")

    weights, moments = get_state_dict(parallel, optimizer, options=WHOLE)  # whole tensors under the plain model's keys
    if rank == 0:
        state = {"model": weights, "optimizer": moments, "guard": guard.state_dict(), "step": start + steps}
        torch.save(state, CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50, help="steps between two checks; 1000 in a long training")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--resume", action="store_true", help=f"go on from {CHECKPOINT}")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.every, arguments.fsdp, arguments.resume)
