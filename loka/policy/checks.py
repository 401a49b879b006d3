"""Checks of single values of a policy, beyond their type. Each returns the value or raises with advice."""

from __future__ import annotations

import fnmatch
import keyword
import re

from pydantic_core import PydanticCustomError

from loka.devices.targets import DEVICES, NO_RTX

REGEX_PREFIX = "re:"
NAME_PATTERN = "^[A-Za-z_][A-Za-z0-9_]*$"
CALLABLE_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
SEEDS_PATTERN = r"^[0-9]{1,19}-[0-9]{1,19}$"
KERNEL_PATTERN = r"^(auto|[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)$"
POWERS_OF_TWO = tuple(2**exponent for exponent in range(20))
MAX_NAME = 100  # also the name of a directory

_NAME = re.compile(NAME_PATTERN)
_KERNEL = re.compile(KERNEL_PATTERN)
_SEEDS = re.compile(SEEDS_PATTERN)


def refuse(reason: str) -> PydanticCustomError:
    """An error for pydantic with LoKA's own message."""
    return PydanticCustomError("loka", "{reason}", {"reason": reason})


def package_name(value: str) -> str:
    """A name that a generated package can have."""
    if not _NAME.fullmatch(value):
        raise refuse(f"{value!r} is no Python identifier; use letters, digits and _, as in ranker_v2")
    if keyword.iskeyword(value):
        raise refuse(f"{value!r} is a Python keyword; choose another name")
    if value.startswith("__"):
        raise refuse(f"{value!r} begins with __, which Python keeps for itself; choose another name")
    if len(value) > MAX_NAME:
        raise refuse(f"{len(value)} characters; use at most {MAX_NAME}, a directory is called so")
    return value


def target(value: str) -> str:
    """The name of a device that plans can be for."""
    if value not in DEVICES:
        if re.search("rtx|sm_?12", value, re.IGNORECASE):
            raise refuse(NO_RTX)
        raise PydanticCustomError("enum", "unknown", {"expected": ", ".join(DEVICES)})
    return value


def callable_name(value: str) -> str:
    """The syntax of "package.module:name"."""
    module, colon, name = value.partition(":")
    parts = [*module.split("."), name]
    if colon and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        return value
    hint = ""
    dotted = value.split(".")
    if not colon and len(dotted) > 1 and all(part.isidentifier() for part in dotted):
        hint = f", perhaps {'.'.join(dotted[:-1])}:{dotted[-1]}"
    raise refuse(f"{value!r} names no callable; write package.module:name{hint}")


def kernel_name(value: str) -> str:
    """The syntax of "library.kernel"; planning checks that it exists."""
    if value == "as-is":
        raise refuse("as-is is the model's own GEMM; write compute: keep")
    if not _KERNEL.fullmatch(value):
        raise refuse(f"{value!r} names no kernel; write auto, or library.kernel as in torch.scaled_mm")
    return value


def seed_range(value: str) -> str:
    """The first and the last of a range of seeds, as "0-13"."""
    if not _SEEDS.fullmatch(value):
        raise refuse(f"{value!r} is no range of seeds; write the first and the last, as in 0-13")
    first, last = map(int, value.split("-"))
    if first > last:
        raise refuse(f"{value!r} ends before it begins; write {last}-{first}")
    return value


def head(value: object) -> object:
    """A head of a model: a key or an attribute, or a place."""
    if (isinstance(value, str) and value) or (type(value) is int and value >= 0):
        return value
    raise refuse(f"{value!r} names no head; write a key of the model's output, or its place, counted from 0")


def distinct(values: list[str | int]) -> list[str | int]:
    """Values of different names."""
    if twice := [value for place, value in enumerate(values) if str(value) in map(str, values[:place])]:
        raise refuse(f"{twice[0]!r} is there twice; name each once")
    return values


def power_of_two(value: int) -> int:
    """A size that is a power of two."""
    if value not in POWERS_OF_TWO:
        below = max(size for size in POWERS_OF_TWO if size <= value)
        raise refuse(f"{value} is no power of two; write {below} or {2 * below}")
    return value


def pattern(value: str) -> str:
    """A glob, or "re:" and a regular expression."""
    compile_pattern(value)
    return value


def compile_pattern(text: str) -> re.Pattern[str]:
    """The pattern as a regular expression, to be used with `fullmatch`.

    In a glob, `*` and `?` take any characters, dots too; `[...]` is one of a set. Case matters.
    """
    if not text.removeprefix(REGEX_PREFIX).strip():
        raise refuse('an empty pattern matches nothing; write "*" for every site')
    if text.startswith(REGEX_PREFIX):
        try:
            return re.compile(text.removeprefix(REGEX_PREFIX))
        except (re.error, OverflowError, RecursionError) as error:
            raise refuse(f"{text!r} is no regular expression ({error}); correct it, or use a glob") from None
    try:
        return re.compile(fnmatch.translate(text))
    except re.error as error:
        raise refuse(f"{text!r} is no glob ({error}); correct the part in brackets") from None
