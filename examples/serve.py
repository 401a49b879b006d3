"""Serves the ranker in FP8 on one device: weights quantized once, the model compiled. It needs ranker.pt of a training.

    loka generate ranker.yaml
    python serve.py

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
    model = ranker.build().to(device).eval()
    model.load_state_dict(torch.load("ranker.pt", map_location=device))  # trained in FP8 or not
    patch = fp8.apply(model, mode="infer")  # quantizes the weights: load them before
    compiled = torch.compile(model, mode="reduce-overhead")  # CUDA graphs: the host is not the limit

    losses = []
    with torch.no_grad():  # frozen weights give no gradients
        for (dense, ids), clicks in itertools.islice(ranker.batches(ranker.BATCH, seed=1), steps):
            with torch.autocast(device.type, torch.bfloat16):
                logits = compiled(dense.to(device), ids.to(device))
            losses.append(ranker.loss(logits, clicks.to(device)))
    patch.verify(backward=False)  # raises unless every planned FP8 GEMM of the forward ran
    print(f"{steps} batches: loss {torch.stack(losses).mean().item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="batches to score")
    main(parser.parse_args().steps)
