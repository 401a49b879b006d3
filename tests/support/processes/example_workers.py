"""Runs the scripts of `examples/`, in this process or in each of two as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.processes.ranks import processes

WORLD = 2
Scripts = Mapping[str, tuple[str, ...]]  # of several processes: the file, its checkpoint or "", its options
SCRIPTS: Scripts = {  # the last goes on from the one before
    "train_ddp": ("train_ddp.py", "ranker.pt"),
    "train_fsdp": ("train_fsdp.py", "ranker.pt"),
    "guarded_ddp": ("train_guarded.py", "guarded.pt", "--every", "1"),
    "guarded_fsdp": ("train_guarded.py", "guarded.pt", "--every", "1", "--fsdp", "--resume"),
}
_NAMES = ("ranker", "sequences", "generated")  # what the examples import; other tests have their own of these names


@contextlib.contextmanager
def own_modules() -> Iterator[None]:
    """What is imported under the names of the examples' modules is theirs inside, and what it was before afterwards."""

    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _NAMES}

    others = taken()
    try:
        yield
    finally:
        taken()
        sys.modules.update(others)


def run(folder: Path, script: str, steps: int, compiler: Callable[..., object], *options: str) -> None:
    """Run a script in a folder for some steps, with `compiler` as torch.compile.

    Inductor would take most of a minute for its C++.
    """
    with pytest.MonkeyPatch.context() as patch, own_modules(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "argv", [script, "--steps", str(steps), *options])
        patch.setattr(torch, "compile", compiler)
        runpy.run_path(script, run_name="__main__")


def start(rank: int, folder: str, ports: tuple[int, ...], scripts: Scripts, steps: int) -> None:
    """One of torchrun's processes: runs the scripts; the output and the checkpoint of each stay in files.

    Each script has a port of its own: a rank that is early would otherwise join the group of the script before.
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(WORLD), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for (name, (script, checkpoint, *options)), port in zip(scripts.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with open(Path(folder, f"{name}.{rank}.txt"), "w", encoding="utf-8") as sys.stdout:
            run(Path(folder), script, steps, lambda function, **_: function, *options)
        if rank == 0 and checkpoint:
            shutil.copy(Path(folder, checkpoint), Path(folder, f"{name}.pt"))
    os._exit(0)  # all files are closed; threads that TorchRec leaves abort an interpreter that ends by itself


def start_all(folder: Path, scripts: Scripts, steps: int) -> None:
    """Run the scripts in each of two processes, one after the other."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in scripts]
        for free in sockets:
            free.bind(("localhost", 0))
        ports = tuple(free.getsockname()[1] for free in sockets)
    started = processes(start, WORLD, str(folder), ports, scripts, steps, join=False)
    try:
        for _ in range(WORLD):  # each call returns when one has ended
            started.join(timeout=90)
    finally:
        for process in started.processes:
            process.kill()
