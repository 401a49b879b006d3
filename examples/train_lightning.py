"""Trains the ranker in FP8 with Lightning's Trainer, compiled, in mixed bfloat16.

    loka generate ranker.yaml
    python train_lightning.py

It needs lightning. It runs on a GPU where there is one, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

import ranker
from generated import clicks as fp8
from loka.integrations import LightningCallback


class Task(LightningModule):
    """Holds the model, and trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ranker.build()
        self.model.compile()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def training_step(self, batch: Any, step: int) -> Tensor:
        (dense, ids), clicks = batch
        loss = ranker.loss(self.model(dense, ids), clicks)
        if step % 10 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
        return loss


def main(steps: int) -> None:
    torch.manual_seed(0)
    task = Task()
    # It binds before the strategy wraps the task, and raises after the first batch unless every planned FP8 GEMM ran.
    bound = LightningCallback(fp8.apply, model="model")
    trainer = Trainer(
        callbacks=[bound],
        max_steps=steps,
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(task, itertools.islice(ranker.batches(ranker.BATCH, seed=0), steps))
    torch.save(task.model.state_dict(), "ranker.pt")  # of the model itself: no "model." in its keys


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
