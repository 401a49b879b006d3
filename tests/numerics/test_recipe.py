"""What a recipe says of itself: each question, and what a change of one operand makes of the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.numerics.enums import OPERANDS, Format, Gemm, Range, Scaling
from loka.numerics.recipe import (
    TRANSPOSED_FROM,
    OperandPair,
    OperandRecipe,
    Recipe,
    transposed_copy,
    transposed_form,
    with_scalings,
)

ROWS = OperandRecipe(power_of_two=True)
COPY = OperandRecipe(power_of_two=True, transposed=True)
COPY_TENSORWISE = replace(COPY, scaling=Scaling.TENSORWISE)
STATIC = OperandRecipe(scaling=Scaling.TENSORWISE, range=Range.STATIC, amax=3.0)
GRADIENT = replace(STATIC, amax=0.5)
WEIGHT = OperandRecipe(scaling=Scaling.TENSORWISE)

CHAIN = Recipe((ROWS, ROWS), (ROWS, COPY), (COPY_TENSORWISE, COPY_TENSORWISE))
STATIC_CHAIN = Recipe((STATIC, WEIGHT), (GRADIENT, WEIGHT), (GRADIENT, STATIC))
E5M2 = {"format": Format.E5M2}


def answers(recipe: Recipe) -> tuple[bool, bool, bool]:
    return recipe.is_chain, recipe.keeps_wgrad, recipe.is_static


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (CHAIN, (True, False, False)),
        (replace(CHAIN, wgrad=(COPY, COPY)), (True, False, False)),
        (replace(CHAIN, wgrad=None), (False, True, False)),
        (replace(CHAIN, dgrad=None, has_dgrad=False), (True, False, False)),
        (replace(CHAIN, dgrad=None, wgrad=None, has_dgrad=False), (False, True, False)),
        (STATIC_CHAIN, (True, False, True)),
        (replace(STATIC_CHAIN, wgrad=None), (False, True, True)),
        (replace(STATIC_CHAIN, dgrad=None, has_dgrad=False), (True, False, True)),
        # Nothing says what the output gradient would be.
        (replace(STATIC_CHAIN, dgrad=None, wgrad=None, has_dgrad=False), (False, False, False)),
        (Recipe(), (False, False, False)),
        (Recipe((ROWS, ROWS)), (False, False, False)),
    ],
)
def test_the_forms_of_chains(recipe: Recipe, expected: tuple[bool, bool, bool]) -> None:
    assert answers(recipe) == expected


@pytest.mark.parametrize(
    "recipe",
    [
        replace(CHAIN, fprop=None),
        replace(CHAIN, dgrad=None),
        replace(CHAIN, fprop=(replace(ROWS, power_of_two=False), ROWS)),
        replace(CHAIN, fprop=(ROWS, replace(ROWS, **E5M2))),
        replace(CHAIN, fprop=(replace(ROWS, range=Range.STATIC, amax=2.0), ROWS)),
        replace(CHAIN, fprop=(replace(ROWS, scaling=Scaling.TENSORWISE), ROWS)),
        replace(CHAIN, fprop=(COPY, ROWS)),
        replace(CHAIN, dgrad=(ROWS, ROWS)),
        replace(CHAIN, dgrad=(replace(ROWS, **E5M2), COPY)),
        replace(CHAIN, dgrad=(ROWS, COPY_TENSORWISE)),
        replace(CHAIN, dgrad=(ROWS, replace(COPY, **E5M2))),
        replace(STATIC_CHAIN, fprop=(STATIC, STATIC)),
        replace(STATIC_CHAIN, fprop=(replace(STATIC, **E5M2), WEIGHT)),
        replace(STATIC_CHAIN, dgrad=(replace(GRADIENT, range=Range.DYNAMIC, amax=None), WEIGHT)),
        replace(STATIC_CHAIN, dgrad=(GRADIENT, replace(WEIGHT, power_of_two=True))),
        replace(STATIC_CHAIN, fprop=(replace(STATIC, scaling=Scaling.ROWWISE), WEIGHT)),
    ],
)
def test_another_operand_of_fprop_or_dgrad_makes_it_none(recipe: Recipe) -> None:
    assert answers(recipe) == answers(replace(recipe, wgrad=None)) == (False, False, False)


@pytest.mark.parametrize(
    ("recipe", "wgrad"),
    [
        (CHAIN, (COPY, COPY_TENSORWISE)),
        (CHAIN, (ROWS, COPY)),
        (CHAIN, (COPY, ROWS)),
        (CHAIN, (replace(COPY, **E5M2), COPY)),
        (CHAIN, (replace(COPY, scaling=Scaling.BLOCKWISE_1X128),) * 2),
        (STATIC_CHAIN, (GRADIENT, replace(STATIC, amax=4.0))),
        (STATIC_CHAIN, (STATIC, GRADIENT)),
        (STATIC_CHAIN, (GRADIENT, WEIGHT)),
    ],
)
def test_another_wgrad_makes_it_none(recipe: Recipe, wgrad: OperandPair) -> None:
    assert answers(replace(recipe, wgrad=wgrad)) == (False, False, False)


def test_a_site_without_dgrad_has_one_in_the_form_of_the_others() -> None:
    without = Recipe.of({Gemm.FPROP: CHAIN.fprop, Gemm.WGRAD: CHAIN.wgrad})
    assert without == replace(CHAIN, dgrad=None, has_dgrad=False)
    assert without.dgrad_in_form == CHAIN.dgrad
    assert replace(without, wgrad=None).dgrad_in_form == CHAIN.dgrad
    assert replace(STATIC_CHAIN, dgrad=None, has_dgrad=False).dgrad_in_form == STATIC_CHAIN.dgrad
    assert replace(CHAIN, dgrad=None).dgrad_in_form is None  # there is one, in the model's dtype
    assert Recipe(wgrad=CHAIN.wgrad, has_dgrad=False).dgrad_in_form is None
    assert [gemm for gemm, _ in without.items()] == [Gemm.FPROP, Gemm.WGRAD]
    assert [gemm for gemm, _ in CHAIN.items()] == list(Gemm)


def test_a_site_without_wgrad_is_a_chain_where_its_other_gemms_have_the_form() -> None:
    without = Recipe.of({Gemm.FPROP: CHAIN.fprop, Gemm.DGRAD: CHAIN.dgrad})
    assert without == replace(CHAIN, wgrad=None, has_wgrad=False)
    assert without.wgrad_in_form == CHAIN.wgrad
    assert answers(without) == answers(CHAIN)
    assert [gemm for gemm, _ in without.items()] == [Gemm.FPROP, Gemm.DGRAD]
    alone = Recipe.of({Gemm.FPROP: CHAIN.fprop})
    assert (alone.dgrad_in_form, alone.wgrad_in_form) == (CHAIN.dgrad, CHAIN.wgrad)
    assert answers(alone) == answers(CHAIN)
    static = replace(STATIC_CHAIN, wgrad=None, has_wgrad=False)
    assert static.wgrad_in_form == STATIC_CHAIN.wgrad
    assert answers(static) == answers(STATIC_CHAIN)
    assert replace(without, dgrad=None).wgrad_in_form is None  # there is a dgrad, in the model's dtype
    assert Recipe.of({Gemm.DGRAD: CHAIN.dgrad}).wgrad_in_form is None


def test_a_recipe_is_fp8_if_one_gemm_is() -> None:
    assert CHAIN.fp8
    assert Recipe(dgrad=(ROWS, ROWS)).fp8
    assert not Recipe().fp8


def test_every_transposed_operand_has_a_source_of_the_same_matrix() -> None:
    for (gemm, operand), (source_gemm, source) in TRANSPOSED_FROM.items():
        assert source is operand
        assert operand in OPERANDS[gemm]
        assert operand in OPERANDS[source_gemm]
        assert list(Gemm).index(source_gemm) < list(Gemm).index(gemm)


def test_what_an_operand_says_of_its_scales() -> None:
    assert [each.is_static for each in (STATIC, WEIGHT, ROWS)] == [True, False, False]
    assert [each.lacks_amax for each in (STATIC, replace(STATIC, amax=None), WEIGHT)] == [False, True, False]
    rows_static = replace(ROWS, range=Range.STATIC, amax=2.0)
    scales = [each.has_one_scale for each in (WEIGHT, COPY, rows_static, ROWS)]
    assert scales == [True, True, True, False]
    assert [each.reads_first_scale for each in (COPY_TENSORWISE, COPY, WEIGHT)] == [True, False, False]
    assert STATIC.without_amax == replace(STATIC, amax=None)


def test_what_can_be_transposed_and_from_what() -> None:
    assert ROWS.can_be_transposed
    assert replace(ROWS, **E5M2).can_be_transposed
    for other in (OperandRecipe(), WEIGHT, replace(ROWS, range=Range.STATIC), replace(WEIGHT, power_of_two=True)):
        assert not other.can_be_transposed
    assert COPY.source == COPY_TENSORWISE.source == ROWS
    assert WEIGHT.source is WEIGHT


@pytest.mark.parametrize(
    ("beside", "scaling"),
    [
        (None, Scaling.TENSORWISE),
        (Scaling.TENSORWISE, Scaling.TENSORWISE),
        (Scaling.ROWWISE, Scaling.ROWWISE),
        (Scaling.BLOCKWISE_1X128, Scaling.ROWWISE),
    ],
)
def test_a_transposed_copy_takes_its_scaling_from_its_neighbour(beside: Scaling | None, scaling: Scaling) -> None:
    made = transposed_copy(Format.E5M2, beside)
    assert made == OperandRecipe(Format.E5M2, scaling, power_of_two=True, transposed=True)


def test_two_transposed_copies_have_two_forms() -> None:
    assert transposed_form((COPY, COPY)) == (COPY_TENSORWISE, COPY_TENSORWISE)
    assert transposed_form((COPY_TENSORWISE, COPY_TENSORWISE)) == (COPY, COPY)
    for other in ((COPY, COPY_TENSORWISE), (ROWS, COPY), (ROWS, ROWS)):
        assert transposed_form(other) is None
    assert with_scalings((STATIC, GRADIENT), (ROWS, WEIGHT)) == (replace(STATIC, scaling=Scaling.ROWWISE), GRADIENT)
