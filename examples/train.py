"""Trains the ranker in FP8 on one device, with torch.compile and bfloat16 autocast.

    loka generate ranker.yaml
    python train.py

It runs on a GPU where there is one, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import ranker
from generated import clicks as fp8


def main(steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = ranker.build().to(device)
    patch = fp8.apply(model)  # in place: parameters and state_dict keys stay as they are
    compiled = torch.compile(model, mode="reduce-overhead")  # CUDA graphs: the host is not the limit
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=0), steps)
    for step, ((dense, ids), clicks) in enumerate(data):
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(dense.to(device), ids.to(device))
        loss = ranker.loss(logits, clicks.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            patch.verify()  # raises unless every planned FP8 GEMM ran, forward and backward
        if step % 10 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")

    torch.save(model.state_dict(), "ranker.pt")  # loads into ranker.build(), with or without FP8


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
