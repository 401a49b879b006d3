"""Which kernels a site's step is made of, for each way of running it: what generated code launches."""

from __future__ import annotations

from plan_costs import CHAIN, ROWS, TURNED

from loka.kernels.parts import Part, Work
from loka.numerics.names import Format, Gemm, Range, Scaling
from loka.plan.costs import (
    Sizes,
    Surroundings,
    has_form_of_chain,
    keeps_wgrad_in_chain,
    sheet_of,
)
from loka.policy.settings import OperandRecipe

SIZES = Sizes(4096, 512, 1024)
AROUND = Surroundings("layer_norm", "layer_norm silu")
AS_IS = dict.fromkeys(Gemm)
PLAIN = dict.fromkeys(Gemm, (OperandRecipe(), OperandRecipe()))


def words(parts: tuple[Part, ...]) -> list[str]:
    return [
        f"{part.work} {part.rows}x{part.columns} {part.around} -> {part.recipe}".replace("  ", " ") for part in parts
    ]


def test_as_it_is_a_site_has_its_norms_in_the_models_dtype() -> None:
    sheet = sheet_of(SIZES, AS_IS, AROUND, False, False)
    assert words(sheet.forward) == [
        "forward 4096x512 layer_norm -> bfloat16",
        "forward 4096x1024 layer_norm silu -> bfloat16",
    ]
    assert words(sheet.backward) == [
        "backward 4096x1024 layer_norm silu -> bfloat16",
        "backward 4096x512 layer_norm -> bfloat16",
    ]


def test_a_chain_writes_fp8_in_the_kernels_around_and_turns_the_rest() -> None:
    sheet = sheet_of(SIZES, CHAIN, AROUND, True, False)
    assert words(sheet.forward) == [
        "forward 4096x512 layer_norm -> e4m3 rowwise",
        "quantise 1024x512 -> e4m3 rowwise",
        "forward 4096x1024 layer_norm silu -> bfloat16",
    ]
    assert words(sheet.backward) == [
        "backward 4096x1024 layer_norm silu -> e4m3 rowwise",
        "turn 4096x1024 -> e4m3 tensorwise",
        "turn 4096x512 -> e4m3 tensorwise",
        "turn 1024x512 -> e4m3 tensorwise",
        "backward 4096x512 layer_norm -> bfloat16",
    ]


def test_a_chain_of_one_linear_alone_quantises_in_passes_of_their_own() -> None:
    fused, alone = (sheet_of(SIZES, CHAIN, AROUND, taken, False) for taken in (True, False))
    assert words(alone.forward)[:2] == ["forward 4096x512 layer_norm -> bfloat16", "quantise 4096x512 -> e4m3 rowwise"]
    assert words(alone.backward)[:2] == [
        "backward 4096x1024 layer_norm silu -> bfloat16",
        "quantise 4096x1024 -> e4m3 rowwise",
    ]
    assert len(alone.forward) == len(fused.forward) + 1
    assert len(alone.backward) == len(fused.backward) + 1


def test_an_activation_before_is_taken_only_with_the_linear_that_it_follows() -> None:
    around = Surroundings("layer_norm silu", "", first=False, takes_before=False)
    joined, apart = (sheet_of(SIZES, CHAIN, around, True, joined) for joined in (True, False))
    assert words(joined.forward)[0] == "forward 4096x512 layer_norm silu -> e4m3 rowwise"
    assert words(apart.forward)[:2] == [
        "forward 4096x512 layer_norm silu -> bfloat16",
        "quantise 4096x512 -> e4m3 rowwise",
    ]
    assert joined.backward == apart.backward
    assert not any(part.work is Work.BACKWARD for part in joined.backward)  # the linear before counts it


def test_other_recipes_quantise_both_operands_of_each_gemm() -> None:
    sheet = sheet_of(SIZES, PLAIN, Surroundings(), True, True)
    assert words(sheet.forward) == ["quantise 4096x512 -> e4m3 rowwise", "quantise 1024x512 -> e4m3 rowwise"]
    assert words(sheet.backward) == [
        "quantise 4096x1024 -> e4m3 rowwise",
        "copy 1024x512 -> bfloat16",
        "quantise 512x1024 -> e4m3 rowwise",
        "copy 4096x1024 -> bfloat16",
        "quantise 1024x4096 -> e4m3 rowwise",
        "copy 4096x512 -> bfloat16",
        "quantise 512x4096 -> e4m3 rowwise",
    ]


def test_one_gemm_in_fp8_has_the_passes_of_that_one_alone() -> None:
    sheet = sheet_of(SIZES, {**AS_IS, Gemm.FPROP: PLAIN[Gemm.FPROP]}, Surroundings(), False, False)
    assert (len(sheet.forward), len(sheet.backward)) == (2, 0)
    wgrad = sheet_of(SIZES, {**AS_IS, Gemm.WGRAD: CHAIN[Gemm.WGRAD]}, Surroundings(), False, False)
    assert words(wgrad.backward) == [
        "quantise 4096x1024 -> e4m3 rowwise",
        "turn 4096x1024 -> e4m3 tensorwise",
        "quantise 4096x512 -> e4m3 rowwise",
        "turn 4096x512 -> e4m3 tensorwise",
    ]


def test_an_input_without_gradient_has_no_turned_weight_and_no_gradient_of_its_norm() -> None:
    pairs = {gemm: CHAIN[gemm] for gemm in (Gemm.FPROP, Gemm.WGRAD)}
    assert has_form_of_chain(pairs)
    sheet = sheet_of(SIZES, pairs, AROUND, True, False)
    assert [part.work for part in sheet.backward] == [Work.BACKWARD, Work.TURN, Work.TURN]


def test_what_counts_as_a_chain() -> None:
    assert has_form_of_chain(CHAIN)
    assert not has_form_of_chain(PLAIN)
    assert not has_form_of_chain({**CHAIN, Gemm.DGRAD: None})
    assert not has_form_of_chain({**CHAIN, Gemm.FPROP: (OperandRecipe(), OperandRecipe())})
    assert not has_form_of_chain({**CHAIN, Gemm.WGRAD: (TURNED, CHAIN[Gemm.WGRAD][1])})
    e5m2 = OperandRecipe(Format.E5M2, power_of_two=True)
    assert not has_form_of_chain({**CHAIN, Gemm.DGRAD: (e5m2, TURNED)})
    kept = {**CHAIN, Gemm.WGRAD: None}
    assert (has_form_of_chain(kept), keeps_wgrad_in_chain(kept)) == (False, True)
    assert keeps_wgrad_in_chain({Gemm.FPROP: (ROWS, ROWS), Gemm.WGRAD: None})


def test_known_scales_have_the_passes_of_a_chain() -> None:
    known, weight = (
        OperandRecipe(scaling=Scaling.TENSORWISE, range=Range.STATIC, amax=4.0),
        OperandRecipe(scaling=Scaling.TENSORWISE),
    )
    pairs = {Gemm.FPROP: (known, weight), Gemm.DGRAD: (known, weight), Gemm.WGRAD: (known, known)}
    assert has_form_of_chain(pairs)
    assert keeps_wgrad_in_chain({**pairs, Gemm.WGRAD: None})
    assert not has_form_of_chain({**pairs, Gemm.WGRAD: (known, weight)})
    sheet, turned = (sheet_of(SIZES, each, AROUND, True, False) for each in (pairs, CHAIN))
    assert sheet.backward == turned.backward
    assert words(sheet.forward)[1] == "quantise 1024x512 -> e4m3 tensorwise"


def test_rows_too_wide_for_a_kernel_run_as_without_a_chain() -> None:
    for k, takes in ((123_200, True), (2**21, False)):
        forward = sheet_of(Sizes(4096, k, 1024), CHAIN, AROUND, True, True).forward
        assert any(part.work is Work.FORWARD and "e4m3" in part.recipe for part in forward) == takes
