"""The hash of a policy covers what a plan depends on."""

from __future__ import annotations

import pytest

from loka.policy.documents import compose
from loka.policy.tree import content_hash

TEXT = "version: 1\nname: p\nmodel: {factory: 'a:b'}\ntrain: {loss: 'a:l', ema: 0.9}\nrules: [{match: a}, {match: b}]\n"


def hashed(text: str) -> str:
    tree, problems = compose(text, "p.yaml")
    assert not problems
    return content_hash(tree)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ema: 0.9", "ema: 0.99"),
        ("train: {loss: 'a:l', ema: 0.9}", "# train: {loss: 'a:l'}"),
        ("name: p", "name: p # ours"),
        ("name: p\nmodel: {factory: 'a:b'}", "model: {factory: 'a:b'}\nname: p"),
    ],
)
def test_training_comments_and_the_order_of_keys_are_not_in_it(before, after) -> None:
    assert hashed(TEXT.replace(before, after)) == hashed(TEXT)


@pytest.mark.parametrize(
    ("before", "after"),
    [("a:b", "a:c"), ("{match: a}, {match: b}", "{match: b}, {match: a}"), ("name: p", "name: p\ntarget: h200")],
)
def test_everything_else_is(before, after) -> None:
    assert hashed(TEXT.replace(before, after)) != hashed(TEXT)
