"""Finds and calls the "package.module:name" callables of a policy, with clear errors for mistakes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from loka.errors import InputError

_LIBRARY = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep)


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


def describe_error(error: BaseException) -> str:
    """Text of an error: `ValueError: the message, at file:line`, on one line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg}, at {error.filename}:{error.lineno}"
    if isinstance(error, SystemExit):
        text = f"SystemExit({error.code!r})"
    else:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
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
            f"{field}: {spec!r} is not of the form 'package.module:name'; write it like 'my_pkg.ranker:build'"
        )
    module = _import(module_name, spec, field)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("__")], n=3)
            hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "; check the spelling"
            raise InputError(f"{field}: {module_name} ({module.__file__ or 'built in'}) has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{field}: {spec} is of type {type(found).__name__}, not callable; name a function instead")
    return found, module


def call(function: Callable[..., object], args: tuple[object, ...], spec: str, field: str) -> object:
    """`function(*args)`; its exceptions become an InputError with the position. Ctrl-C is passed on."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as error:
        shown = ", ".join(repr(a) for a in args)
        what = describe_error(error)
        raise InputError(f"{field}: {spec}({shown}) raised {what}; make this call work first") from error


def _import(module_name: str, spec: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(missing + "."):
            raise InputError(
                f"{field}: there is no module {missing!r} (for {spec!r}); it is looked for in {os.getcwd()} and on "
                f"Python's path: run this from the project's root, or install the package"
            ) from error
        what = describe_error(error)
        raise InputError(
            f"{field}: importing {module_name} raised {what}; install {missing!r} or correct the import"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{field}: importing {module_name} raised {describe_error(error)}; make 'import {module_name}' work first"
        ) from error
