"""Trains an MMoE of TorchEasyRec by its own loop, from its config, with the dense part in FP8.

    loka generate mmoe.yaml
    torchrun --nproc-per-node 2 train.py

It needs TorchEasyRec (tzrec), which imports packages that PyPI does not have: graphlearn, common_io and Alibaba's pyfg;
its requirements name their addresses. It runs on GPUs where there are any, otherwise on CPUs.
"""

from __future__ import annotations

import argparse
import os

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tzrec.main
from tzrec.datasets.utils import Batch
from tzrec.models.model import TRAIN_FWD_TYPE, TrainWrapper

import ranker
from generated import easyrec_mmoe as fp8
from loka.dispatch import Patch

SIZES = {"user": 1000, "item": 1000, "shop": 100, "city": 100}


class BindingTrainWrapper(TrainWrapper):
    """TorchEasyRec's wrapper of the model that it trains; binds the dense part in its first forward.

    TorchRec's pipeline traces the model before that, and goes into modules that are called out of an nn.ModuleList, as
    the towers are: a bound one cannot be traced.
    """

    binds = True
    patch: Patch | None = None
    steps = 0

    def forward(self, batch: Batch) -> TRAIN_FWD_TYPE:
        if isinstance(batch, torch.fx.Proxy) or not self.training:
            return super().forward(batch)
        if self.binds and self.steps == 0:
            self.patch = fp8.apply(ranker.DensePart(self.model))  # in place: where these modules are in the model
            self.patch.verify_ranks()  # on every rank: all of them have the same package
        if self.patch is not None and self.steps == 1:
            self.patch.verify()  # on every rank; raises unless every planned FP8 GEMM ran, forward and backward
        loss, results = super().forward(batch)
        if self.steps % 10 == 0 and os.environ["RANK"] == "0":
            print(f"step {self.steps:3}: loss {loss.item():.4f}")
        self.steps += 1
        return loss, results


def write_samples(path: str, rows: int) -> None:
    """Synthetic samples: a click depends on the parity of ids, and a buy on that of two of them."""
    random = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(size, (rows,), generator=random) for name, size in SIZES.items()}
    signs = {name: values % 2 - 0.5 for name, values in ids.items()}
    logits = {"click": 2 * sum(signs.values()), "buy": 2 * (signs["item"] + signs["shop"])}
    labels = {name: torch.bernoulli(logit.sigmoid(), generator=random).long() for name, logit in logits.items()}
    pq.write_table(pa.table({name: column.numpy() for name, column in {**ids, **labels}.items()}), path)


def main(steps: int, bind: bool) -> None:
    BindingTrainWrapper.binds = bind
    tzrec.main.TrainWrapper = BindingTrainWrapper
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == "0":
        write_samples("train.parquet", steps * world * 512)
    tzrec.main.train_and_evaluate(ranker.CONFIG)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="without FP8")
    arguments = parser.parse_args()
    main(arguments.steps, not arguments.plain)
