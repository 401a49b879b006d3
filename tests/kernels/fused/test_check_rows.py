"""What an operator says of matrices that are not what it was generated for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from loka.errors import InputError
from loka.kernels.fused import checks


def test_matrices_of_the_width_and_the_rows_pass() -> None:
    checks.check_rows(torch.zeros(3, 8), 8)
    checks.check_rows(torch.zeros(3, 8), 8, 3)


@pytest.mark.parametrize(
    ("matrix", "rows", "said"),
    [
        (torch.zeros(1, 8), 3, r"3 rows got one of shape \(1, 8\)"),  # it would be read beyond its end
        (torch.zeros(3, 9), 3, "rows of 8 elements"),
        (torch.zeros(3, 8, dtype=torch.int64), None, "rows of 8 elements"),
        (torch.zeros(8), 3, "rows of 8 elements"),
    ],
)
def test_others_are_refused(matrix: torch.Tensor, rows: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        checks.check_rows(matrix, 8, rows)


def test_rows_that_differ_in_a_traced_graph_are_refused() -> None:
    """Nothing compares them later: the compiler launches the kernel itself."""
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first, second = (mode.from_tensor(torch.zeros(m, 8), symbolic_context=rows) for m in (3, 5))
    with mode, pytest.raises(InputError, match="a kernel for matrices of"):
        checks.check_rows(first, 8, second.shape[0])


def test_rows_that_come_from_data_are_no_guard() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        first, second = (torch.zeros(shapes.create_unbacked_symint(), 8) for _ in range(2))
        checks.check_rows(first, 8, second.shape[0])
    assert not shapes.guards


def test_the_width_is_one_of_the_packages() -> None:
    assert checks.width_of(torch.zeros(3, 8), {8: "a", 16: "b"}) == 8
    with pytest.raises(InputError, match=r"floating rows of 8, 12 or 16 elements got torch.float32 of shape \(3, 9\)"):
        checks.width_of(torch.zeros(3, 9), (8, 12, 16))
    with pytest.raises(InputError, match="rows of 8 or 16 elements got"):
        checks.width_of(torch.zeros(3, 8, dtype=torch.int64), (8, 16))


def test_vectors_have_the_width_of_the_rows() -> None:
    checks.check_vectors(8, torch.zeros(8), torch.zeros(8))
    with pytest.raises(InputError, match=r"rows of 8 elements got a vector of shape \(9,\)"):  # or it would be cut off
        checks.check_vectors(8, torch.zeros(8), torch.zeros(9))
