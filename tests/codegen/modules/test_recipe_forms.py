"""Planning and code generation give the same answers: both ask the plan's `Recipe`."""

from __future__ import annotations

from itertools import product

import pytest

from loka.codegen.chains.chain_calls import chain_recipe
from loka.codegen.modules.linear_recipes import site_recipe
from loka.numerics.enums import Accumulation
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

WEIGHT, STATIC = plans.TENSORWISE, plans.STATIC
FPROPS = (None, (chains.ROWS, chains.ROWS), (plans.ROWWISE, plans.ROWWISE), (STATIC, WEIGHT))
DGRADS = (None, (chains.ROWS, chains.TRANSPOSED), (plans.ROWWISE, plans.ROWWISE), (STATIC, WEIGHT))
WGRADS = (None, (chains.TRANSPOSED_TENSORWISE,) * 2, (chains.TRANSPOSED,) * 2, (plans.ROWWISE,) * 2, (STATIC,) * 2)


@pytest.mark.parametrize("input_grad", [True, False])
def test_generated_code_has_the_form_that_the_plan_is_priced_in(input_grad: bool) -> None:
    forms = set()
    for fprop, dgrad, wgrad in product(FPROPS, DGRADS if input_grad else (None,), WGRADS):
        plan = plans.site_plan("a", fprop, dgrad, wgrad, input_grad=input_grad)
        mixed = (*plan.gemms[:-1], plans.gemm_plan(plan.gemms[-1].gemm, wgrad, fast=True))
        for each in (plan, plans.replace(plan, gemms=mixed)):
            written = chain_recipe(each).operands
            expected = (each.recipe.is_chain, each.recipe.keeps_wgrad, each.recipe.is_static)
            assert (written.is_chain, written.keeps_wgrad, written.is_static) == expected
            forms.add(expected)
    assert len(forms) == (5 if input_grad else 4)  # rows, static, each with wgrad and without, and none


def test_a_static_site_without_dgrad_is_a_chain_whatever_its_sums() -> None:
    plan = plans.site_plan("a", (STATIC, WEIGHT), None, (STATIC, STATIC), input_grad=False)
    mixed = plans.replace(plan, gemms=(plan.gemms[0], plans.gemm_plan(plan.gemms[1].gemm, (STATIC, STATIC), fast=True)))
    for each in (plan, mixed):
        recipe = site_recipe(each)
        assert recipe.operands.is_chain
        assert recipe.dgrad is not None
        assert recipe.dgrad.operands == (STATIC, WEIGHT)
        assert recipe.dgrad.accumulation is Accumulation.PRECISE
