"""Kernels with products, residuals and carried gradients: their reference, their text, compiled and interpreted."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import Products
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.kernels.product_cases import (
    arguments,
    backwards,
    every,
    exact,
    exact_products,
    forwards,
    inputs_of,
    product_inputs,
    products,
)
from tests.support.kernels.rendered_cases import Package, write_package
from tests.support.pairwise import fields_of, pairwise

pytestmark = pytest.mark.slow

WIDTHS = (13, 48, 512)


ROWS = (1, 7, 0)


def with_rows(case: tuple[NormForward | NormBackward, int]) -> dict[str, Hashable]:
    return {**fields_of(case[0]), "rows": case[1]}


FORWARDS, BACKWARDS = (
    pairwise(((spec, rows) for width in WIDTHS for spec in specs(width) for rows in ROWS), with_rows)
    for specs in (forwards, backwards)
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    specs = dict.fromkeys([spec for spec, _ in (*FORWARDS, *BACKWARDS)])
    specs |= dict.fromkeys([*every(48), *(spec for width in WIDTHS for spec in products(width))])
    return write_package(tmp_path_factory.mktemp("products") / "rendered_products", [*specs])


@pytest.mark.parametrize(("spec", "rows"), FORWARDS)
def test_forward_is_float64s(package: Package, spec: NormForward, rows: int) -> None:
    tensors = inputs_of(rows, spec.width, torch.float32)
    known = exact(spec, tensors, spec.residual)
    got = package.run(spec, *arguments(spec, tensors, known), *([torch.float64] if spec.takes_dtype else []))
    if spec.quantize:
        value = got["values"].double() * got["scale"].double()
        assert ((value - known["y"]).abs() <= 2.0**-4 * known["y"].abs() + 2.0**-9 * got["scale"]).all()
    else:
        torch.testing.assert_close(got["out"], known["y"], rtol=1e-5, atol=1e-4)
    for name in ("kept", "mean", "rstd"):
        if name in spec.results:
            torch.testing.assert_close(got[name].double(), known[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("spec", "rows"), BACKWARDS)
def test_backward_is_float64s(package: Package, spec: NormBackward, rows: int) -> None:
    tensors = inputs_of(rows, spec.width, torch.float32)
    known = exact(spec, tensors, spec.summed)
    got = package.run(spec, *arguments(spec, tensors, known))
    size = known["dx"].abs().amax() if rows else 0.0
    if spec.quantize:
        value = got["values"].double() * got["scale"].double()
        assert ((value - known["dx"]).abs() <= 2.0**-4 * known["dx"].abs() + 2.0**-9 * got["scale"] + 1e-5 * size).all()
    else:
        assert ((got["dx"].double() - known["dx"]).abs() <= 1e-5 * size).all()
    for name in spec.results:
        if name == "residual_grad_out":
            torch.testing.assert_close(got[name].double(), known[name], rtol=1e-4, atol=1e-3)
        elif name in ("dweight", "dbias", "dadd"):
            torch.testing.assert_close(got[name].double().sum(0), known[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", [spec for width in WIDTHS for spec in products(width)], ids=lambda s: s.function)
def test_products_are_float64s(package: Package, spec: Products) -> None:
    for rows in (7, 0):
        tensors = product_inputs(spec, rows, torch.bfloat16)
        got = package.run(spec, *tensors.values(), torch.float32)["out"]
        torch.testing.assert_close(got.double(), exact_products(spec, tensors), rtol=1e-5, atol=1e-5)


def test_a_kept_sum_and_a_carried_gradient_have_their_own_dtypes(package: Package) -> None:
    tensors = inputs_of(3, 48, torch.bfloat16)
    forward = next(spec for spec in forwards(48) if spec.quantize and spec.keep and spec.norm is None)
    plain = [tensors[name] for name in forward.parameters]
    assert package.run(forward, *plain)["kept"].dtype == torch.bfloat16
    assert package.run(forward, *plain, torch.float32)["kept"].dtype == torch.float32
    backward = next(
        spec for spec in backwards(48) if spec.residual_grad_in and spec.residual_grad_out and spec.norm is None
    )
    given = {**tensors, "residual_grad_in": tensors["residual_grad_in"].float()}
    assert (
        package.run(backward, *(given[name] for name in backward.parameters))["residual_grad_out"].dtype
        == torch.float32
    )


def test_operators_hold_what_the_compiler_expects(package: Package) -> None:
    tensors = inputs_of(3, 48, torch.float32)
    for spec in pairwise((*forwards(48), *backwards(48))):
        known = exact(spec, tensors, spec.residual if isinstance(spec, NormForward) else spec.summed)
        torch.library.opcheck(getattr(package.fused, spec.function).overload, tuple(arguments(spec, tensors, known)))
    for product in products(48):
        given = (*product_inputs(product, 3, torch.float32).values(), torch.bfloat16)
        torch.library.opcheck(getattr(package.fused, product.function).overload, given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormForward(8, None, False, False, 0.0, None, True, False, True, keep=True), "no other sum to keep"),
        (lambda: NormForward(8, None, False, False, 0.0, None, False, True, True, keep=True), "keep a copy"),
        (lambda: NormBackward(8, None, False, False, 0.0, None, True, True, residual_grad_out=True), "would copy grad"),
        (
            lambda: NormBackward(
                8, None, False, False, 0.0, None, True, False, residual_grad_in=True, residual_grad_out=True
            ),
            "has no residual_grad_out",
        ),
        (lambda: NormBackward(8, "rms_norm", True, False, 0.0, None, True, True, times=True), "needs what it took"),
        (lambda: NormBackward(8, None, False, False, 0.0, None, True, True, summed=True), "reads no sum"),
        (lambda: Products(8, 1, ()), "copy its input"),
        (lambda: Products(0, 2, ()), "0 wide"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
