"""`requantize_transpose`: which operands it touches, what follows from it, and who is said to have decided that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.numerics.enums import OPERANDS, Compute, Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import TRANSPOSED_FROM, OperandRecipe
from loka.policy.settings import SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [SiteFacts("layers.0.mlp.0", "linear", 64, 32, 32, 0.5), SiteFacts("head.out", "linear", 64, 32, 1, 0.5)]
ROWS = OperandRecipe(power_of_two=True)
TRANSPOSED = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)
TRANSPOSED_BESIDE_ROWS = OperandRecipe(power_of_two=True, transposed=True)

Resolve = Callable[..., tuple[SiteSettings, ...]]


def transposed(settings: SiteSettings) -> set[tuple[Gemm, Operand]]:
    return {
        (gemm, operand)
        for gemm in Gemm
        for operand, recipe in zip(OPERANDS[gemm], settings.gemms[gemm].operands, strict=True)
        if recipe.transposed
    }


def test_the_shortest_policy_that_transposes(resolve: Resolve) -> None:
    line = "defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true}\n"
    settings = resolve(HEAD + line, SITES)[0]
    assert {gemm.compute for gemm in settings.gemms.values()} == {Compute.FP8}
    assert settings.gemms[Gemm.FPROP].operands == (ROWS, ROWS)
    assert settings.gemms[Gemm.DGRAD].operands == (ROWS, TRANSPOSED_BESIDE_ROWS)
    assert settings.gemms[Gemm.WGRAD].operands == (TRANSPOSED, TRANSPOSED)


@pytest.mark.parametrize(
    ("written", "touched"),
    [
        ("requantize_transpose: true", set(TRANSPOSED_FROM)),
        ("wgrad: {requantize_transpose: true}", {(Gemm.WGRAD, Operand.GRAD_OUTPUT), (Gemm.WGRAD, Operand.INPUT)}),
        ("dgrad: {requantize_transpose: true}", {(Gemm.DGRAD, Operand.WEIGHT)}),
        ("dgrad: {weight: {requantize_transpose: true}}", {(Gemm.DGRAD, Operand.WEIGHT)}),
        ("wgrad: {input: {requantize_transpose: true}}", {(Gemm.WGRAD, Operand.INPUT)}),
        ("requantize_transpose: true, wgrad: {requantize_transpose: false}", {(Gemm.DGRAD, Operand.WEIGHT)}),
        (
            "wgrad: {requantize_transpose: true, input: {requantize_transpose: false}}",
            {(Gemm.WGRAD, Operand.GRAD_OUTPUT)},
        ),
        ("requantize_transpose: false", set()),
        ("power_of_two: true", set()),
    ],
)
def test_it_touches_what_is_read_along_its_other_dimension(written: str, touched: set, resolve: Resolve) -> None:
    settings = resolve(HEAD + f"defaults: {{{written}}}\n", SITES)[0]
    assert transposed(settings) == touched
    for gemm, operand in set(TRANSPOSED_FROM) - touched:
        assert settings.gemms[gemm].operands[OPERANDS[gemm].index(operand)].scaling is Scaling.ROWWISE


def test_a_later_rule_takes_it_back_and_the_rules_before_hold_again(resolve: Resolve) -> None:
    text = "defaults: {scaling: tensorwise, requantize_transpose: true}\n"
    text += "rules: [{match: head.out, requantize_transpose: false}]\n"
    first, second = resolve(HEAD + text, SITES)
    assert transposed(first) == set(TRANSPOSED_FROM)
    assert transposed(second) == set()
    assert second.gemms[Gemm.WGRAD].operands == (OperandRecipe(scaling=Scaling.TENSORWISE),) * 2
    assert [each.value for each in second.history["wgrad.input.requantize_transpose"]] == ["true", "false"]


def test_format_follows_the_source_and_range_is_measured(resolve: Resolve) -> None:
    text = (
        "defaults:\n  requantize_transpose: true\n  format: e4m3\n  dgrad: {grad_output: {format: e5m2}}\n"
        "  wgrad: {format: e4m3, range: static, amax: 4}\n"
    )
    settings = resolve(HEAD + text, SITES)[0]
    grad_output, inputs = settings.gemms[Gemm.WGRAD].operands
    assert (grad_output.format, inputs.format) == (Format.E5M2, Format.E4M3)
    for recipe in (grad_output, inputs):
        assert (recipe.range, recipe.amax, recipe.power_of_two) == (Range.DYNAMIC, None, True)


@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE])
def test_one_transposed_operand_takes_the_scaling_beside_it(scaling: Scaling, resolve: Resolve) -> None:
    settings = resolve(
        HEAD + f"defaults: {{scaling: {scaling}, wgrad: {{input: {{requantize_transpose: true}}}}}}\n", SITES
    )[0]
    first, second = settings.gemms[Gemm.WGRAD].operands
    assert (first.scaling, second.scaling, first.transposed, second.transposed) == (scaling, scaling, False, True)


def test_a_static_range_is_asked_for_no_maximum_where_the_operand_is_transposed(resolve: Resolve) -> None:
    settings = resolve(HEAD + "defaults: {requantize_transpose: true, wgrad: {range: static}}\n", SITES)[0]
    assert settings.gemms[Gemm.WGRAD].operands[0].range is Range.DYNAMIC


def test_history_says_what_being_transposed_decided_and_leaves_out_what_it_did_not(resolve: Resolve) -> None:
    text = "defaults:\n  power_of_two: true\n  requantize_transpose: true\n  dgrad: {grad_output: {format: e5m2}}\n"
    history = resolve(HEAD + text, SITES)[0].history
    scaling, format = history["wgrad.grad_output.scaling"], history["wgrad.grad_output.format"]
    assert [(each.value, each.source, each.line) for each in scaling] == [
        ("rowwise", "built-in", 0),
        ("tensorwise", "transposed from dgrad.grad_output", 6),
    ]
    assert [each.value for each in format] == ["e4m3", "e5m2"]
    assert [each.source for each in history["wgrad.grad_output.power_of_two"]] == ["built-in", "defaults"]
    assert [each.source for each in history["dgrad.weight.scaling"]] == ["built-in"]


def test_a_policy_that_does_not_say_it_has_no_trace_of_it(resolve: Resolve) -> None:
    settings = resolve(HEAD + "defaults: {scaling: rowwise, power_of_two: true}\n", SITES)[0]
    assert not [path for path in settings.history if path.endswith("requantize_transpose")]
