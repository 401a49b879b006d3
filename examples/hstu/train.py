"""Trains the HSTU under a policy of this folder with a guard, which names what FP8 harms, and evaluates the future.

loka generate unscaled.yaml
python train.py unscaled
python train.py none
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
from pathlib import Path

import sequences
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import loka


@torch.no_grad()
def normalised_entropy(model: nn.Module) -> float:
    """Log loss over that of the constant, on 4,096 rows spread over the future."""
    model.eval()
    every = itertools.islice(sequences.test_batches(512, 0), 0, None, 5)
    logits, targets = zip(*((model(*inputs).squeeze(1), target) for inputs, target in every), strict=True)
    model.train()
    target = torch.cat(targets)
    share = float(target.mean())
    constant = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    return float(binary_cross_entropy_with_logits(torch.cat(logits), target)) / constant


def main(policy: str, steps: int, every: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = sequences.build()
    patch = guard = None
    if policy != "none":
        try:
            package = importlib.import_module(f"generated.hstu_{policy}")
        except ModuleNotFoundError:
            sys.exit(f"There is no package of {policy}.yaml; run `loka generate {policy}.yaml` in this folder first.")
        patch = package.apply(model)
        if every:
            guard = loka.Guard(
                model, patch, loss=lambda model, batch: sequences.loss(model(*batch[0]), batch[1]), every=every
            )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step, batch in enumerate(itertools.islice(sequences.batches(64, seed), steps)):
        if guard is not None:
            guard.step(batch)  # a module that falls back is logged, with the step and the figure
        inputs, target = batch
        optimizer.zero_grad()
        loss = sequences.loss(model(*inputs), target)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    print(f"NE of the future: {normalised_entropy(model):.5f}")
    for overflow in () if patch is None else patch.overflows():
        print(overflow)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))
    parser.add_argument("policy", choices=["none", *policies], help="a policy of this folder; none: no FP8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checks of the guard; 0: no guard")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.policy, arguments.steps, arguments.every, arguments.rate, arguments.seed)
