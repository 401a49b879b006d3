"""Functions run in several processes of one group (gloo or NCCL), and what each process got from them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing


def run_rank(
    functions: Mapping[str, Any],
    names: Sequence[str],
    rank: int,
    world: int,
    folder: str,
    arguments: Callable[[], tuple[Any, ...]] = tuple,
    seconds: int = 60,
    backend: str = "gloo",
) -> None:
    """Join the group, call the functions of these names with the rank and the `arguments`, which are made in the group.

    Saves what each returns or why it failed. No collective takes longer than so many seconds.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    given, results = arguments(), {}
    for name in names:
        try:
            results[name] = functions[name](rank, *given)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported by the test, with its traceback
            results[name] = traceback.format_exc()
        dist.barrier()
    torch.save(results, Path(folder) / f"{rank}.pt")
    gc.collect()  # where a reducer is the last to hold the group, freeing it can wait for ever
    dist.destroy_process_group()


def processes(start: Callable[..., None], world: int, *arguments: Any, join: bool = True) -> Any:
    """Call `start(rank, *arguments)` in each process, forked from one that has imported torch, which takes longest.

    Those of one test process share it, with the environment that the first has found. On GPUs each is a new process.
    """
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp"])
    return multiprocessing.start_processes(start, arguments, world, join, start_method=method)


def start_ranks(start: Callable[..., None], world: int, folder: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Call `start(rank, folder, *arguments)`, which calls `run_rank`, in each process; the results by rank."""
    processes(start, world, str(folder), *arguments)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def results_of(saved: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The results of one function, of each rank that has one; fails with the traceback of a rank where it failed."""
    for results in saved:
        assert not isinstance(results[name], str) or "Traceback" not in results[name], results[name]
    return [results[name] for results in saved if results[name] is not None]
