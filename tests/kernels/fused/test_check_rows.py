"""What a kernel's host function says of matrices that are not what it was generated for."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused import operators


def test_matrices_of_the_width_and_the_rows_pass() -> None:
    operators.check_rows(torch.zeros(3, 8), 8)
    operators.check_rows(torch.zeros(3, 8), 8, 3)


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
        operators.check_rows(matrix, 8, rows)
