"""`turned`, the former name of `requantize_transpose`, is an error at its place that gives the new name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.policy.policy import Policy

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
Load = Callable[..., Policy]


@pytest.mark.parametrize(
    "defaults",
    [
        "{§turned: true}",
        "{wgrad: {§turned: true}}",
        "{wgrad: {input: {§turned: true}}}",
        "{requantize_transpose: false, §turned: true}",
    ],
)
def test_a_former_name_is_refused_with_the_new_one(defaults: str, load: Load, refused: Callable[..., None]) -> None:
    refused(
        load, HEAD + f"defaults: {defaults}\n", Code.UNKNOWN_KEY, "it is called requantize_transpose now: write that"
    )
    load(HEAD + f"defaults: {defaults.replace('§turned', 'power_of_two')}\n")


def test_where_neither_may_stand_it_is_an_unknown_key(load: Load, refused: Callable[..., None]) -> None:
    words = "write requantize_transpose site-wide, or where an operand"
    refused(load, HEAD + "defaults: {fprop: {§turned: true}}\n", Code.UNKNOWN_KEY, words)
