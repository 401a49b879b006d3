"""Trains the ranker in FP8 with DistributedDataParallel, torch.compile and bfloat16 autocast.

    loka generate ranker.yaml
    torchrun --nproc-per-node 2 train_ddp.py

It runs on GPUs where there are any, otherwise on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ranker
from generated import clicks as fp8


def main(steps: int) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = ranker.build().to(device)
    patch = fp8.apply(model)  # before or after DDP: apply looks inside
    patch.verify_ranks()  # on every rank: all of them have the same package
    parallel = DistributedDataParallel(model)
    compiled = torch.compile(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=rank), steps)
    for step, ((dense, ids), clicks) in enumerate(data):
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(dense.to(device), ids.to(device))
        loss = ranker.loss(logits, clicks.to(device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients over ranks
        optimizer.step()
        if step == 0:
            patch.verify()  # on every rank
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if rank == 0:
                print(f"step {step:3}: loss {mean.item():.4f}")

    if rank == 0:
        torch.save(model.state_dict(), "ranker.pt")  # of the model itself: no "module." in its keys
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
