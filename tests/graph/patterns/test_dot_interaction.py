"""Dot interactions in a forward: what is one, and what only looks like one."""

from __future__ import annotations

import pytest

from loka.graph.expression import Call, local, method
from loka.graph.ir import DotInteraction, ForwardIR, Shape, Statement
from loka.graph.patterns.dot_interaction import find_dot_interactions


def forward(*more: Statement, axes: tuple[int, int] = (1, 2), factors: tuple[str, str] = ("x", "turned")) -> ForwardIR:
    turned = Statement("turned", "transpose", method(local("x"), "transpose", *axes))
    product = Statement("pairs", "matmul", Call("torch.matmul", tuple(map(local, factors))))
    return ForwardIR("", "models.Dlrm", ("x", "y"), (turned, product, *more), local("pairs"), ())


SHAPES: dict[str, Shape] = {"x": (None, 27, 128), "y": (None, 27, 128), "turned": (None, 128, 27)}
READ = Statement("twice", "mul", Call("operator.mul", (local("turned"), 2.0)))


def test_the_kernel_has_the_transposition_that_it_alone_reads() -> None:
    assert find_dot_interactions(forward(), SHAPES) == (DotInteraction(1, (0,), "x", (27, 128)),)
    assert find_dot_interactions(forward(READ), SHAPES) == (DotInteraction(1, (), "x", (27, 128)),)


@pytest.mark.parametrize(
    "other",
    [
        forward(axes=(0, 1)),
        forward(factors=("y", "turned")),
        forward(factors=("turned", "x")),
        forward(factors=("x", "x")),
    ],
    ids=["other axes", "another tensor", "of dimensions", "not turned"],
)
def test_other_products_are_none(other: ForwardIR) -> None:
    assert find_dot_interactions(other, SHAPES) == ()


@pytest.mark.parametrize("shape", [(), (None, 128), (5, 27, 128), (None, None, 128), (None, 4, 27, 128)], ids=str)
def test_samples_of_another_shape_are_none(shape: Shape) -> None:
    assert find_dot_interactions(forward(), {**SHAPES, "x": shape} if shape else {}) == ()
