"""Functions report their tests while they are watched, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loka.graph.trace.watched_functions import watched


class Recorder:
    """Answers every test as Python does, and keeps its name."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, filename: str, line: int) -> None:
        self.seen.append("enter")

    def test_is(self, left: Any, right: Any) -> bool:
        self.seen.append("is")
        return left is right

    def test_isinstance(self, value: Any, types: Any) -> bool:
        self.seen.append("isinstance")
        return isinstance(value, types)

    def test_hasattr(self, value: Any, name: str) -> bool:
        self.seen.append("hasattr")
        return hasattr(value, name)

    def test_callable(self, value: Any) -> bool:
        self.seen.append("callable")
        return callable(value)

    def test_type(self, value: Any) -> type:
        self.seen.append("type")
        return type(value)

    def test_len(self, value: Any) -> int:
        self.seen.append("len")
        return len(value)

    def test_range(self, *bounds: Any) -> range:
        self.seen.append("range")
        return range(*bounds)

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **kwargs)


class Base:
    def name(self, x: Any) -> str:
        return "base"


class Private(Base):
    __secret = 3

    def name(self, x: Any) -> str:
        if x is not None and isinstance(x, int):
            return f"{super().name(x)} {self.__secret}"
        return "none"


def closes_over(count: int) -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return [len(part) + count for part in x if part is not None], type(x) is list

    return inner


def makes(x: Any) -> Any:
    kind = type("Made", (), {})
    return torch.zeros(len(x), dtype=torch.int64), hasattr(x, "append"), callable(x), kind.__name__, [*range(2)]


TESTS = [lambda x: (len(x), x is None), lambda x: x is None]  # two in a line


def shadows(len: Callable[[Any], int]) -> int:
    return len([])


@pytest.mark.parametrize(
    ("function", "call", "seen"),
    [
        (Private.name, lambda: Private().name(3), ["enter", "is", "isinstance", "enter"]),
        (closes_over, lambda: closes_over(2)([[1], None]), ["enter", "is", "len", "is", "type", "is"]),
        (makes, lambda: str(makes([1])), ["enter", "len", "zeros", "hasattr", "callable", "range"]),
        (shadows, lambda: shadows(lambda _: 7), ["enter"]),
        (TESTS[0], lambda: TESTS[0]([1]), ["enter", "len", "is"]),
        (TESTS[1], lambda: TESTS[1]([1]), ["enter", "is"]),
    ],
    ids=["private", "closure", "makes", "shadows", "lambda", "second lambda"],
)
def test_a_watched_function_reports_its_tests_and_computes_the_same(
    function: Any, call: Callable[[], Any], seen: list[str]
) -> None:
    recorder, before, expected = Recorder(), function.__code__, call()
    with watched([function], recorder):
        assert call() == expected
        assert function.__code__ is not before
    assert recorder.seen == seen
    assert function.__code__ is before
    assert call() == expected
    assert recorder.seen == seen
    assert "loka_tests" not in globals()


def test_a_closure_is_watched_too() -> None:
    recorder, inner = Recorder(), closes_over(2)
    with watched([inner], recorder):  # type: ignore[list-item]
        assert inner([[1]]) == ([3], True)
    assert recorder.seen == ["enter", "is", "len", "type", "is"]


def test_a_line_of_an_error_is_the_line_of_the_file() -> None:
    with watched([raises_for_none], Recorder()), pytest.raises(ValueError, match="here") as error:
        raises_for_none(None)
    entry = error.traceback[-1]
    assert entry.path.name == "test_watched_functions.py"
    assert "here" in str(entry.statement)


def raises_for_none(x: Any) -> None:
    if x is None:
        raise ValueError("here")


def test_a_function_without_source_stays_as_it_is() -> None:
    scope: dict[str, Any] = {}
    exec("def made(x):\n    return x is None\n", scope)  # noqa: S102
    recorder, before = Recorder(), scope["made"].__code__
    with watched([scope["made"]], recorder):
        assert scope["made"].__code__ is before
