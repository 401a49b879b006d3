"""Finds and calls the "package.module:name" callables of a policy, with clear errors for mistakes."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from loka.errors import Code, InputError

_LIBRARY = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parents[1] / "graph" / "sites") + os.sep,
    str(Path(__file__).parents[1] / "graph" / "capture.py"),
    str(Path(__file__).parents[1] / "trial") + os.sep,
    str(Path(__file__).parents[1] / "probe" / "capture" / "watch.py"),  # stands around every function of torch
)

_LOKA = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_LONGEST = 400  # characters of an error's own message


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Put the current directory first on sys.path inside the block."""
    here = os.getcwd()
    importlib.invalidate_caches()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def is_library_file(filename: str) -> bool:
    """True if a file belongs to torch, to Python's internals, or to this room, rather than to a model's author."""
    return filename.startswith(_LIBRARY) or filename.startswith("<")


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame of a traceback that is not torch's or LoKA's; "" where there is none."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not is_library_file(frame.filename) and f"{os.sep}importlib{os.sep}" not in frame.filename:
            place = f"{frame.filename}:{frame.lineno}"
    return place


def authors_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The frame of the model author's code that raised an error, itself or in a library; None if LoKA's own did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_LOKA):
            return None
        library = is_library_file(frame.filename) or frame.filename.startswith(_STANDARD_LIBRARY)
        if not library and not _INSTALLED.search(frame.filename):
            return frame
    return None


def lokas_place(error: BaseException) -> str:
    """`file:line` of the innermost frame of LoKA's own code; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_LOKA)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def message_of(error: BaseException) -> str:
    """The first line of an error's message, bounded."""
    first, *_ = str(error).strip().splitlines() or [""]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."


def describe_error(error: BaseException) -> str:
    """Text of an error: `ValueError: the message, at file:line`, on one line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}, at {error.filename}:{error.lineno}"
    if isinstance(error, SystemExit):
        text = f"SystemExit({error.code!r})"
    else:
        message = message_of(error)
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = place_of(error)
    return f"{text}, at {place}" if place else text


def find_callable(spec: str, field: str) -> tuple[Callable[..., object], ModuleType]:
    """The callable that `spec` ("package.module:name") names, and its module.

    Args:
        spec: As written by the user.
        field: The field it is for, to begin the message with ("model.factory").

    Raises:
        InputError: It is malformed, not found, raises on import, or is not callable.
    """
    module_name, colon, name = spec.partition(":")
    parts = [*module_name.split("."), *name.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise InputError(
            f"{field}: {spec!r} is not of the form 'package.module:name'; write it like 'my_pkg.ranker:build'",
            Code.CALLABLE,
        )
    module = _import(module_name, spec, field)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("__")], n=3)
            hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "; check the spelling"
            raise InputError(
                f"{field}: {module_name} ({module.__file__ or 'built in'}) has no {part!r}{hint}", Code.CALLABLE
            )
        found = getattr(found, part)
    if not callable(found):
        raise InputError(
            f"{field}: {spec} is of type {type(found).__name__}, not callable; name a function instead",
            Code.CALLABLE,
        )
    return found, module


def call(function: Callable[..., object], args: tuple[object, ...], spec: str, field: str) -> object:
    """`function(*args)`; its exceptions become an InputError with the position. Ctrl-C is passed on."""
    shown = ", ".join(repr(a) for a in args)
    try:
        return function(*args)
    except InputError as error:
        raise InputError(f"{field}: {spec}({shown}): {error}", Code.CALLABLE) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{field}: {spec}({shown}) raised {describe_error(error)}; make this call work first", Code.CALLABLE
        ) from error


def _import(module_name: str, spec: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(missing + "."):
            raise InputError(
                f"{field}: there is no module {missing!r} (for {spec!r}); it is looked for in {os.getcwd()} and on "
                f"Python's path: run this from the project's root, or install the package",
                Code.CALLABLE,
            ) from error
        advice = _advice(error, module_name) or f"install {missing!r} or correct the import"
        raise InputError(
            f"{field}: importing {module_name} raised {describe_error(error)}; {advice}", Code.CALLABLE
        ) from error
    except (Exception, SystemExit) as error:
        advice = _advice(error, module_name) or f"make 'import {module_name}' work first"
        raise InputError(
            f"{field}: importing {module_name} raised {describe_error(error)}; {advice}", Code.CALLABLE
        ) from error


def _advice(error: BaseException, module_name: str) -> str:
    """What to do where a training script imports its generated package, which may be what is generated; else ""."""
    absent = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "generated"
    refused = isinstance(error, InputError) and any(  # by the package's own check of its files
        Path(frame.filename).with_name("manifest.json").exists() for frame in traceback.extract_tb(error.__traceback__)
    )
    if not (absent or refused):
        return ""
    return f"import the generated package in the function that trains, not at the top of {module_name}"
