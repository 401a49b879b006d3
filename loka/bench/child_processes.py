"""Processes of a benchmark: started by spawn, each with its end of a pipe, and ended whatever they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

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


class ChildProcesses:
    """Context manager: starts processes, and ends them on exit."""

    def __init__(self) -> None:
        self._context = get_context("spawn")
        self._started: list[ChildProcess] = []

    def start(self, target: Callable[..., object], *arguments: Any) -> ChildProcess:
        """Run `target(*arguments, channel)` in a new process; all must be picklable."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, theirs))
        process.start()
        theirs.close()
        self._started.append(ChildProcess(process, ours))
        return self._started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._started:
            child.channel.close()
            child.process.join(0.0 if child.failure or kind is not None else STOPPING)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
