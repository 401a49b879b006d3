"""Processes of a benchmark: started by spawn, each with its end of a pipe, and ended whatever they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

LONGEST = 24 * 3600.0  # longest wait for a process, in seconds, if nothing sets a shorter one
STOPPING = 10.0  # seconds that a process has to exit after its last message


@dataclass(slots=True)
class ChildProcess:
    """A process and our end of its pipe; `failure` is why it has sent nothing."""

    process: SpawnProcess
    channel: Connection
    failure: str = ""

    def received(self, end: float) -> object:
        """Its next message, awaited until `end` (time.monotonic); without one set `failure` and return None."""
        try:
            if self.channel.poll(min(max(0.0, end - time.monotonic()), LONGEST)):
                return self.channel.recv()
            self.failure = "its time was up (--seconds)"
        except (EOFError, OSError):
            self.process.join(STOPPING)
            self.failure = f"its process ended with status {self.process.exitcode} (see above)"
        return None


@contextmanager
def child_processes() -> Iterator[Callable[..., ChildProcess]]:
    """Context whose value starts processes, all of which have ended when it is left.

    `start(target, *arguments)` runs `target(*arguments, channel)` in a new process; all must be picklable.
    """
    context, started = get_context("spawn"), list[ChildProcess]()

    def start(target: Callable[..., object], *arguments: Any) -> ChildProcess:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs))
        process.start()
        theirs.close()
        started.append(ChildProcess(process, ours))
        return started[-1]

    patience = 0.0  # left by an exception
    try:
        yield start
        patience = STOPPING
    finally:
        for child in started:
            child.channel.close()
            child.process.join(0.0 if child.failure else patience)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
