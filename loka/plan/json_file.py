"""Reads the JSON files that a policy's plans are kept in: whole, of one version, with the fields of their model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from loka.errors import Code, InputError
from loka.paths import open_plain, shown

Layout = TypeVar("Layout")


@dataclass(frozen=True, slots=True)
class JsonFormat(Generic[Layout]):
    """A kind of file, and what to say about one that cannot be read."""

    name: str  # the value of its `format`
    version: int
    adapter: TypeAdapter[Layout]
    noun: str  # "plan"
    foreign: str  # "not a plan of LoKA; name a plan.json of `loka generate`": for any other file
    again: str  # "make it again with `loka generate POLICY`"

    def text_of(self, path: Path) -> str:
        """The text of a file. Raises InputError, and FileNotFoundError."""
        try:
            with open_plain(path) as file:
                return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{shown(path)}: not a text in UTF-8; {self.again}", Code.PLAN_FILE) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InputError(
                f"{shown(path)}: cannot be read ({error.strerror or error}); check the path", Code.PLAN_FILE
            ) from error

    def parse(self, text: str, name: str) -> Layout:
        """The content of a text; `name` is the file's, for messages. Raises InputError."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{name}:{error.lineno}:{error.colno}: not a whole JSON file ({error.msg}); it may have been cut "
                f"short: {self.again}",
                Code.PLAN_FILE,
            ) from error
        except (ValueError, RecursionError) as error:  # a number with more digits than Python reads; deep nesting
            raise InputError(f"{name}: damaged: {error}; {self.again}", Code.PLAN_FILE) from error
        if not isinstance(data, Mapping) or data.get("format") != self.name:
            raise InputError(f"{name}: {self.foreign}", Code.PLAN_FILE)
        if data.get("version") != self.version:
            raise InputError(
                f"{name}: the {self.noun} has version {data.get('version')!r} and this LoKA reads {self.version}: "
                f"{self.again}",
                Code.PLAN_FILE,
            )
        try:
            return self.adapter.validate_json(text, strict=True)
        except ValidationError as error:
            found = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))  # of a value of many types
            place = ".".join(str(part) for part in found["loc"]) or "the file"
            what = "there is no such field" if found["type"] == "unexpected_keyword_argument" else found["msg"]
            raise InputError(f"{name}: damaged at {place}: {what}; {self.again}", Code.PLAN_FILE) from error

    def damaged(self, name: str, what: str) -> InputError:
        """The error for well-formed data that cannot be."""
        return InputError(f"{name}: damaged: {what}; {self.again}", Code.PLAN_FILE)


def dump(value: Any) -> str:
    """One line of JSON with sorted keys; a float is the shortest text that reads back the same, on every machine."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(", ", ": "))
