"""Trains the ranker in FP8 with Hugging Face's Trainer, compiled, in mixed bfloat16.

    loka generate ranker.yaml
    python train_transformers.py

It needs transformers and accelerate. It runs on a GPU where there is one, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import ranker
from generated import clicks as fp8
from loka.integrations import TransformersCallback


class Task(nn.Module):
    """Holds the model, and returns its loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ranker.build()
        self.model.compile()

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> dict[str, Tensor]:
        return {"loss": ranker.loss(self.model(dense, ids), clicks)}


class Samples(IterableDataset):
    """Samples one by one, which the Trainer makes batches of."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for (dense, ids), clicks in ranker.batches(ranker.BATCH, seed=0):
            for row in range(len(clicks)):
                yield {"dense": dense[row], "ids": ids[row], "clicks": clicks[row]}


class PrintingTrainer(Trainer):
    """Prints the loss of one batch in ten."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step % 10 == 0:
            print(f"step {self.state.global_step:3}: loss {loss.item():.4f}")
        return loss


def main(steps: int) -> None:
    torch.manual_seed(0)
    task = Task()
    settings = TrainingArguments(
        max_steps=steps,
        per_device_train_batch_size=ranker.BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    # It binds before the Trainer wraps the task, and raises after the first step unless every planned FP8 GEMM ran.
    bound = TransformersCallback(fp8.apply, model="model")
    PrintingTrainer(task, settings, train_dataset=Samples(), callbacks=[bound]).train()
    torch.save(task.model.state_dict(), "ranker.pt")  # of the model itself: no "model." in its keys


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
