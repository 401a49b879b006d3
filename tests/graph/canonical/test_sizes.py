"""Norms over sizes that a forward takes from a shape."""

from __future__ import annotations

import pytest

from loka.graph.canonical.sizes import numbers_in_norms
from loka.graph.ir import Ref, RefKind, Statement

X, W, SIZE = Ref(RefKind.LOCAL, "x"), Ref(RefKind.ATTRIBUTE, "self.w"), Ref(RefKind.LOCAL, "d")
SHAPES = {"x": (None, 16, 32), "normed": (None, 16, 32)}
NORM = Statement("normed", "layer_norm", "torch.nn.functional.layer_norm({0}, ({1},), {2})", (X, SIZE, W))


def local(name: str) -> Ref:
    return Ref(RefKind.LOCAL, name)


@pytest.mark.parametrize(
    "before",
    [
        [Statement("shape", "shape", "{0}.shape", (X,)), Statement("d", "getitem", "{0}[2]", (local("shape"),))],
        [Statement("shape", "size", "{0}.size()", (X,)), Statement("d", "getitem", "{0}[-1]", (local("shape"),))],
        [Statement("d", "size", "{0}.size(-1)", (X,))],
        [Statement("d", "getitem", "{0}.shape[2]", (X,))],
    ],
    ids=["unpacked", "of size()", "size", "shape"],
)
def test_a_norm_over_a_size(before: list[Statement]) -> None:
    readers = {"shape": {1}, "d": {len(before)}}
    (norm,) = numbers_in_norms([*before, NORM], SHAPES, readers)
    assert norm.text() == "normed = torch.nn.functional.layer_norm(x, (32,), self.w)"
    assert norm.written == (*before, NORM)


def test_a_size_that_others_read_stays() -> None:
    shape = Statement("shape", "shape", "{0}.shape", (X,))
    before = (shape, Statement("d", "getitem", "{0}[2]", (local("shape"),)))
    for readers, left in (({"shape": {1, 3}, "d": {2}}, (shape,)), ({"shape": {1}, "d": {2, 3}}, before)):
        made = numbers_in_norms([*before, NORM], SHAPES, readers)
        assert made[:-1] == left
        assert made[-1].text() == "normed = torch.nn.functional.layer_norm(x, (32,), self.w)"


@pytest.mark.parametrize(
    "before",
    [
        [Statement("d", "getitem", "{0}.shape[0]", (X,))],  # the batch
        [Statement("d", "getitem", "{0}[1]", (X,))],  # a sample, no size
        [Statement("d", "getitem", "{0}.shape[3]", (X,))],
    ],
    ids=["batch", "item", "absent"],
)
def test_what_is_no_known_size_stays(before: list[Statement]) -> None:
    assert numbers_in_norms([*before, NORM], SHAPES, {"d": {1}}) == (*before, NORM)
