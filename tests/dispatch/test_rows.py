"""Tensors that kernels of rows read, and those that they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.dispatch import runtime
from loka.errors import InputError


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_an_input_without_elements_has_a_result_without_any(shape: tuple[int, ...]) -> None:
    found = runtime.without_elements(torch.empty(shape), 8, 3, torch.bfloat16)
    assert (found.shape, found.dtype) == ((*shape[:-1], 3), torch.bfloat16)


@pytest.mark.parametrize("shape", [(0, 9), (5, 0), (0,), (2, 0, 1)])
def test_nor_does_one_of_another_width_make_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"rows of 8 elements got an input of shape .*generate it again"):
        runtime.without_elements(torch.empty(shape), 8, 3, torch.float32)


X = torch.arange(12.0).view(3, 4)
UNUSUAL = {
    "nested": lambda: torch.nested.nested_tensor([X[:1], X]),
    "jagged": lambda: torch.nested.nested_tensor([X[:1], X], layout=torch.jagged),
    "sparse_coo": lambda: X.to_sparse(),
    "sparse_csr": lambda: X.to_sparse_csr(),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_not_dense_are_refused_with_what_to_do(kind: str, frozen: bool) -> None:
    says = "nested" if kind == "jagged" else kind
    with pytest.raises(InputError, match=rf"reads dense tensors, and its input is {says}: .*patch\.keep"):
        runtime.output_dtype(UNUSUAL[kind](), *(() if frozen else (X,)))


def test_transforms_of_torch_func_are_refused_where_autograd_records() -> None:
    def double(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        runtime.output_dtype(x, *weights)
        return 2 * x

    with pytest.raises(InputError, match=r"have no rules for torch\.func \(vmap, .*patch\.remove\(\) before"):
        torch.func.vmap(lambda x: double(x, X))(X)
    assert torch.equal(torch.func.vmap(double)(X), 2 * X)  # frozen: no gradients
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode"):
        double(X, X)


def test_a_sharded_weight_beside_a_plain_input_names_the_cause() -> None:
    class DTensor(torch.Tensor):
        """As torch.distributed's, by its name."""

    weight = torch.ones(2, 4).as_subclass(DTensor)
    with pytest.raises(InputError, match=r"a weight of shape \(2, 4\) is sharded .* an FSDP unit of its own"):
        runtime.refuse_unusual(X, (X, weight))
    runtime.refuse_unusual(X.as_subclass(DTensor), (weight,))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_dtypes_of_results() -> None:
    x = torch.zeros(1)
    made = torch.empty(4, 8, device="meta", dtype=torch.bfloat16)  # which autocast has nothing of
    assert runtime.output_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert runtime.output_dtype(x) == torch.float16
        assert runtime.output_dtype(x.double()) == torch.float64
        assert runtime.joined_dtype(x.half()) == nn.functional.layer_norm(x.half(), (1,)).dtype == torch.float16
        assert runtime.output_dtype(made) == runtime.joined_dtype(made) == torch.bfloat16
        assert runtime.joined_dtype(made, made.float()) == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert runtime.output_dtype(x) == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert runtime.output_dtype(x) == torch.float32
