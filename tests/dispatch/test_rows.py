"""Tensors as the matrices that kernels of rows read."""

from __future__ import annotations

import pytest
import torch

from loka import dispatch
from loka.errors import InputError


@pytest.mark.parametrize("shape", [(8,), (5, 8), (0, 8), (2, 0, 8), (2, 3, 4, 8)])
def test_tensors_of_one_shape_become_matrices(shape: tuple[int, ...]) -> None:
    tensors = torch.randn(shape), torch.randn((8, *shape[:-1])).movedim(0, -1)  # the second is not contiguous
    for tensor, found in zip(tensors, dispatch.rows(8, *tensors), strict=True):
        assert found.shape == (tensor.numel() // 8, 8)
        assert torch.equal(found.reshape(shape), tensor)


@pytest.mark.parametrize("other", [(1, 8), (8,), (2, 5, 8), (5, 4), (5, 1)])
def test_other_shapes_are_refused_also_those_that_broadcast(other: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"rows of 8 elements got the shapes \(5, 8\), "):
        dispatch.rows(8, torch.randn(5, 8), torch.randn(other))
    with pytest.raises(InputError, match="generate it again"):
        dispatch.rows(8, torch.randn(()))
