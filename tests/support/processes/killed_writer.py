"""A process of its own, for the tests: writes packages and dies at a given operation, and imports what is left.

Reads a request a line, prints an answer a line. Each request runs in a fork, and so starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loka.dispatch  # noqa: F401 - so that forks import a package in no time
from loka.codegen import write_package

_CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}  # os.replace counts as a rename, unlink as a removal


class Countdown:
    """Kills this process just before its n-th operation that changes the disk, with SIGKILL."""

    def __init__(self, operations: int) -> None:
        self._left = operations

    def operation(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if opened or event in _CHANGING:
            self.operation()


def write(folder: str, files: dict[str, str], operations: int) -> str:
    """Write a package and die before the given number of operations is exceeded; "written" where it is not."""
    countdown = Countdown(operations)
    os.fsync = lambda descriptor: countdown.operation()  # a kill needs none, only a power cut
    sys.addaudithook(countdown.audit)
    write_package(files, Path(folder))
    return "written"


def import_package(folder: str) -> str:
    """The stamp of a package that imports; "refused: " and the reason of one that does not."""
    path = Path(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(path.parent))
    try:
        return str(__import__(path.name).STAMP)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        return f"refused: {error}"


def in_a_fork(action: Callable[..., str], arguments: list[Any]) -> str:
    """What an action says, or "killed"."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.write(writing, action(*arguments).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return answer if os.WIFEXITED(status) else "killed"


if __name__ == "__main__":
    for line in sys.stdin:
        verb, *given = json.loads(line)
        print(json.dumps(in_a_fork({"write": write, "import": import_package}[verb], given)), flush=True)
