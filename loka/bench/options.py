"""Checks of what was typed after `loka bench`, before anything is measured."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from loka.devices.targets import GPU_TARGETS
from loka.errors import InputError

WHAT = ("kernels", "model")
BELONGS: Mapping[str, tuple[str, ...]] = {  # option -> options or kinds of benchmark of which one is required with it
    "--record": ("kernels",),
    "--export": ("kernels",),
    "--parts": ("--record",),
    "--policy": ("--record",),
    "--seconds": ("--record", "model"),
    "--jobs": ("--record",),
    "--target": ("--export",),
    "--casting": ("model",),
    "--batch": ("model",),
    "--rounds": ("model",),
    "--only": ("model",),
    "--variants": ("model",),
    "--gpus": ("model",),
    "--link": ("--gpus",),
}
APART = {"--gpus": ("--only", "--casting")}  # option -> those that would be ignored beside it


def check_options(what: str, given: Collection[str]) -> None:
    """Reject options that would be ignored. `given`: those on the command line, such as "--jobs". Raises InputError."""
    if what not in WHAT:
        raise InputError(f"loka bench: there is no {what!r} to measure; write one of {', '.join(WHAT)}")
    for option, others in BELONGS.items():
        if option in given and not set(others) & {*given, what}:
            named = [each if each.startswith("--") else f"loka bench {each}" for each in others]
            raise InputError(f"loka bench: {option} goes with {' or '.join(named)}; add one, or leave {option} out")
    for option, ignored in APART.items():
        if option in given and (idle := [each for each in ignored if each in given]):
            raise InputError(f"loka bench model {option}: training steps in bfloat16 alone; leave {idle[0]} out")
    if what == "kernels" and not {"--record", "--export"} & set(given):
        raise InputError("loka bench kernels: add --record FILE to measure kernels, or --export FILE to write them out")


def check_recording(names: Sequence[str], record: Path | None, export: Path | None, target: str) -> None:
    """Raise InputError for what does not go with --record or --export, before minutes are spent on measuring."""
    if record is not None and names:
        raise InputError(f"loka bench kernels --record: name kinds of parts with --parts, not {names[0]!r}")
    if record is None and export is not None and len(names) != 1:
        raise InputError("loka bench kernels --export: name the one file of measurements that is to be exported")
    if target not in GPU_TARGETS:
        raise InputError(f"--target: nothing is measured for {target!r}; write one of {', '.join(GPU_TARGETS)}")


def check_least(option: str, value: int | None, least: int = 1) -> None:
    """Raise InputError for a number below `least`."""
    if value is not None and value < least:
        raise InputError(f"{option}: {value} is too few; write {least} or more")


def check_seconds(seconds: float) -> None:
    """Raise InputError unless `seconds` is a time to work in."""
    if math.isnan(seconds) or seconds <= 0:
        raise InputError(f"--seconds: {seconds:g} is no time to work in; write a number above 0")


def listed(option: str, text: str | None, known: Collection[str]) -> tuple[str, ...]:
    """The names in the comma-separated list of an option, in the order of `known`; () for None.

    Raises InputError for an unknown name, and for an empty list.
    """
    if text is None:
        return ()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option}: names none; there are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise InputError(f"{option}: there is no {name!r}; there are {', '.join(known)}{did_you_mean(name, known)}")
    return tuple(name for name in known if name in names)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the names like it, if any."""
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""
