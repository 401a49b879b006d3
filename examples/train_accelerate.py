"""Trains the ranker in FP8 with Accelerate, compiled, in mixed bfloat16.

    loka generate ranker.yaml
    accelerate launch train_accelerate.py

It needs accelerate. It runs on GPUs where there are any, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from accelerate import Accelerator

import ranker
from generated import clicks as fp8
from loka.integrations import AccelerateHook


def main(steps: int) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    model = ranker.build()
    hook = AccelerateHook(accelerator, fp8.apply, model)  # before prepare, which sets a forward on the model
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    data = itertools.islice(ranker.batches(ranker.BATCH, seed=accelerator.process_index), steps)
    for step, ((dense, ids), clicks) in enumerate(data):
        dense, ids, clicks = (each.to(accelerator.device) for each in (dense, ids, clicks))
        hook.step(((dense, ids), clicks))  # on every rank; raises after the first step unless every FP8 GEMM ran
        loss = ranker.loss(prepared(dense, ids), clicks)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0:
            accelerator.print(f"step {step:3}: loss {loss.item():.4f}")

    if accelerator.is_main_process:
        torch.save(model.state_dict(), "ranker.pt")  # of the model itself: no "module." in its keys


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
