"""Which kernels a site's step is made of, for each way of running it: what generated code launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.graph.expression import local
from loka.graph.ir import Dropout
from loka.graph.patterns.linear_chain import ChainStage, LinearChain
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from loka.numerics.enums import Accumulation, Format, Gemm, Range, Scaling
from loka.numerics.recipe import OperandRecipe, Recipe
from loka.plan.rewrite.rewrites import Rewrites
from loka.plan.select.perf_model import Latency, PerfModel
from loka.plan.select.workload import (
    SiteSizes,
    Surroundings,
    gemm_part,
    surroundings_of,
    workload_of,
)
from tests.support.plan.plan_costs import CHAIN, MadeUp

SIZES = SiteSizes(4096, 512, 1024)
AROUND = Surroundings("layer_norm", "layer_norm silu")
AS_IS = dict.fromkeys(Gemm)
PLAIN = dict.fromkeys(Gemm, (OperandRecipe(), OperandRecipe()))


def words(parts: tuple[Part, ...]) -> list[str]:
    return [
        f"{part.work} {part.rows}x{part.columns} {part.around} -> {part.recipe}".replace("  ", " ") for part in parts
    ]


KNOWN, WEIGHT = (
    OperandRecipe(scaling=Scaling.TENSORWISE, range=Range.STATIC, amax=4.0),
    OperandRecipe(scaling=Scaling.TENSORWISE),
)
STATIC = {Gemm.FPROP: (KNOWN, WEIGHT), Gemm.DGRAD: (KNOWN, WEIGHT), Gemm.WGRAD: (KNOWN, KNOWN)}
FORWARD, FORWARD_AFTER = "forward 4096x512 layer_norm -> bfloat16", "forward 4096x1024 layer_norm silu -> bfloat16"
BACKWARD, BACKWARD_AFTER = (
    "backward 4096x512 layer_norm -> bfloat16",
    "backward 4096x1024 layer_norm silu -> bfloat16",
)
INPUT, WEIGHTS, GRADIENT = (f"quantize {sizes} -> e4m3 rowwise" for sizes in ("4096x512", "1024x512", "4096x1024"))
TURN_INPUT, TURN_WEIGHTS, TURN_GRADIENT = (
    f"turn {sizes} -> e4m3 tensorwise" for sizes in ("4096x512", "1024x512", "4096x1024")
)
CHAIN_FORWARD = ["forward 4096x512 layer_norm -> e4m3 rowwise", WEIGHTS, FORWARD_AFTER]
STATIC_FORWARD = [CHAIN_FORWARD[0], "quantize 1024x512 -> e4m3 tensorwise", FORWARD_AFTER]
TURNS = [TURN_GRADIENT, TURN_INPUT, TURN_WEIGHTS]
CHAIN_BACKWARD = ["backward 4096x1024 layer_norm silu -> e4m3 rowwise", *TURNS, BACKWARD]
EACH_OPERAND = [
    GRADIENT,
    "copy 1024x512 -> bfloat16",
    "quantize 512x1024 -> e4m3 rowwise",
    "copy 4096x1024 -> bfloat16",
    "quantize 1024x4096 -> e4m3 rowwise",
    "copy 4096x512 -> bfloat16",
    "quantize 512x4096 -> e4m3 rowwise",
]
NO_DGRAD = {gemm: CHAIN[gemm] for gemm in (Gemm.FPROP, Gemm.WGRAD)}
NO_WGRAD = {gemm: CHAIN[gemm] for gemm in (Gemm.FPROP, Gemm.DGRAD)}
NO_BACKWARD = {Gemm.FPROP: CHAIN[Gemm.FPROP]}
FPROP_ALONE = {**AS_IS, Gemm.FPROP: PLAIN[Gemm.FPROP]}
WGRAD_ALONE = {**AS_IS, Gemm.WGRAD: CHAIN[Gemm.WGRAD]}


@pytest.mark.parametrize(
    ("pairs", "around", "fused", "forward", "backward"),
    [
        (AS_IS, AROUND, False, [FORWARD, FORWARD_AFTER], [BACKWARD_AFTER, BACKWARD]),
        (CHAIN, AROUND, True, CHAIN_FORWARD, CHAIN_BACKWARD),  # it writes FP8 in the kernels around
        (STATIC, AROUND, True, STATIC_FORWARD, CHAIN_BACKWARD),
        # of one linear alone, which quantizes in passes of their own
        (CHAIN, AROUND, False, [FORWARD, INPUT, WEIGHTS, FORWARD_AFTER], [BACKWARD_AFTER, GRADIENT, *TURNS, BACKWARD]),
        (NO_DGRAD, AROUND, True, CHAIN_FORWARD, CHAIN_BACKWARD[:3]),
        (NO_WGRAD, AROUND, True, CHAIN_FORWARD, [CHAIN_BACKWARD[0], TURN_WEIGHTS, BACKWARD]),
        (NO_BACKWARD, AROUND, True, CHAIN_FORWARD, []),
        ({Gemm.FPROP: None}, AROUND, False, [FORWARD, FORWARD_AFTER], []),
        (PLAIN, Surroundings(), True, [INPUT, WEIGHTS], EACH_OPERAND),
        (FPROP_ALONE, Surroundings(), False, [INPUT, WEIGHTS], []),
        (WGRAD_ALONE, Surroundings(), False, [], [GRADIENT, TURN_GRADIENT, INPUT, TURN_INPUT]),
    ],
)
def test_a_step_is_made_of_these_kernels(pairs, around, fused, forward, backward) -> None:
    workload = workload_of(SIZES, Recipe.of(pairs), around, fused, False)
    assert (words(workload.forward), words(workload.backward)) == (forward, backward)


def test_an_activation_before_is_taken_only_with_the_linear_that_it_follows() -> None:
    around = Surroundings("layer_norm silu", "", first=False, takes_before=False)
    joined, apart = (workload_of(SIZES, Recipe.of(CHAIN), around, True, joined) for joined in (True, False))
    assert words(joined.forward)[0] == "forward 4096x512 layer_norm silu -> e4m3 rowwise"
    assert words(apart.forward)[:2] == [
        "forward 4096x512 layer_norm silu -> bfloat16",
        "quantize 4096x512 -> e4m3 rowwise",
    ]
    assert joined.backward == apart.backward
    assert not any(part.work is PartKind.BACKWARD for part in joined.backward)  # the linear before counts it


def test_passes_under_known_scales_cost_more_than_those_that_find_them() -> None:
    """As measured: known scales are not for speed."""
    perf_model = PerfModel(MadeUp())
    for around, factor in ((AROUND, 1.03), (Surroundings("block_norm hardswish", "block_norm"), 1.25)):
        workloads = [workload_of(SIZES, Recipe.of(each), around, True, False) for each in (STATIC, CHAIN)]
        for ours, theirs in zip(*((*workload.forward, *workload.backward) for workload in workloads), strict=True):
            found, plain = perf_model.part(ours), perf_model.part(theirs)
            assert found is not None
            assert plain is not None
            assert found.us == pytest.approx(plain.us * (1.0 if ours.recipe == "bfloat16" else factor))
            assert (found.source is TimeSource.ESTIMATED) == (ours.recipe != "bfloat16")


def test_rows_too_wide_for_a_kernel_run_as_without_a_chain() -> None:
    for k, takes in ((123_200, True), (2**21, False)):
        forward = workload_of(SiteSizes(4096, k, 1024), Recipe.of(CHAIN), AROUND, True, True).forward
        assert any(part.work is PartKind.FORWARD and "e4m3" in part.recipe for part in forward) == takes


@pytest.mark.parametrize(
    ("fed_by", "followed_by", "expected"),
    [
        (("layer_norm",), ("layer_norm", "silu"), AROUND),
        (
            ("silu", "layer_norm", "linear"),
            ("layer_norm", "linear"),
            Surroundings("layer_norm silu", "layer_norm", False, False, False),
        ),
        (("add", "mul", "linear"), ("mul", "add", "linear"), Surroundings("", "", False, False, False)),
        (("add", "layer_norm", "cat"), ("sigmoid",), Surroundings("layer_norm", "sigmoid")),
        (("dropout", "layer_norm"), ("softmax",), Surroundings("layer_norm dropout", takes_before=False)),
        ((), (), Surroundings(takes_before=False)),
    ],
)
def test_what_stands_around_a_site_by_the_models_own_operations(fed_by, followed_by, expected, make_site) -> None:
    assert surroundings_of(make_site(fed_by=fed_by, followed_by=followed_by)) == expected


def test_gemms_are_looked_up_by_their_own_sizes_and_recipe() -> None:
    wgrad = gemm_part(Gemm.WGRAD, SIZES, "k", CHAIN[Gemm.WGRAD], Accumulation.FAST)
    assert (wgrad.rows, wgrad.columns, wgrad.contraction) == (1024, 512, 4096)
    assert wgrad.recipe == "e4m3 tensorwise, e4m3 tensorwise, fast"
    mixed = (OperandRecipe(Format.E5M2, Scaling.TENSORWISE), OperandRecipe())
    assert gemm_part(Gemm.DGRAD, SIZES, "k", mixed, None).recipe == "e5m2 tensorwise, e4m3 rowwise, precise"
    assert gemm_part(Gemm.FPROP, SIZES, "as-is", None, None).recipe == ""


def test_what_was_not_measured_takes_the_time_of_what_moves_like_it() -> None:
    measured = {("", "e4m3 rowwise"), ("layer_norm", "bfloat16")}
    costs = MadeUp(factor=lambda part: 1.0 if (part.around, part.recipe) in measured else None)
    perf_model = PerfModel(costs)
    norm = Part(PartKind.FORWARD, "rendered", 4096, 512, recipe="bfloat16", around="rms_norm silu")
    known = perf_model.part(Part(PartKind.FORWARD, "rendered", 4096, 512, recipe="bfloat16", around="layer_norm"))
    found = perf_model.part(norm)
    assert found is not None
    assert known is not None
    assert (found.us, found.source, known.source) == (known.us, TimeSource.ESTIMATED, TimeSource.MEASURED)
    transposed = perf_model.part(Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", 4096, 512, recipe="e4m3 tensorwise"))
    quantized = perf_model.part(Part(PartKind.QUANTIZE, "rendered", 4096, 512, recipe="e4m3 rowwise"))
    assert transposed is not None
    assert quantized is not None
    assert 0 < transposed.us < quantized.us
    assert transposed.source is TimeSource.ESTIMATED
    assert perf_model.part(gemm_part(Gemm.FPROP, SIZES, "never", None, None)) is None


@pytest.mark.parametrize(
    ("around", "measured", "taken"),
    [
        ("layer_norm sigmoid", ("layer_norm silu", "layer_norm"), "layer_norm silu"),
        ("block_norm silu", ("layer_norm silu", "block_norm hardswish"), "block_norm hardswish"),
        ("rms_norm sigmoid", ("layer_norm silu", "rms_norm"), "rms_norm"),
        ("sigmoid", ("relu", "layer_norm"), "relu"),
        ("rms_norm", ("layer_norm silu", "layer_norm"), "layer_norm"),
    ],
)
def test_the_nearest_norm_and_activation_stand_in_for_others(around: str, measured: tuple, taken: str) -> None:
    factors = {each: 1.0 + place for place, each in enumerate(measured)}
    perf_model = PerfModel(MadeUp(factor=lambda part: factors.get(part.around)))
    found = perf_model.part(Part(PartKind.BACKWARD, "rendered", 4096, 512, recipe="bfloat16", around=around))
    known = perf_model.part(Part(PartKind.BACKWARD, "rendered", 4096, 512, recipe="bfloat16", around=taken))
    assert found is not None
    assert known is not None
    assert (found.us, found.source) == (known.us, TimeSource.ESTIMATED)


@pytest.mark.parametrize(
    ("around", "derived_from"),
    [
        ("batch_norm", "layer_norm"),
        ("batch_norm relu", "layer_norm relu"),
        ("batch_norm relu dropout", "batch_norm relu"),
    ],
)
@pytest.mark.parametrize("recipe", ["bfloat16", "e4m3 rowwise"])
def test_a_batch_norm_and_a_dropout_cost_more_than_what_they_are_derived_from(
    around: str, derived_from: str, recipe: str
) -> None:
    perf_model = PerfModel(MadeUp())

    def both_ways(kernel: str, recipe: str, around: str) -> Latency:
        works = (PartKind.FORWARD, PartKind.BACKWARD)
        found = perf_model.sum(Part(work, kernel, 16384, 2048, recipe=recipe, around=around) for work in works)
        assert found is not None
        return found

    made, without = both_ways("rendered", recipe, around), both_ways("rendered", recipe, derived_from)
    assert without.us < made.us < both_ways("compiled", "bfloat16", around).us
    assert (made.source, made.noise > 0.05 * (made.us - without.us)) == (TimeSource.ESTIMATED, True)


@pytest.mark.parametrize("around", ["layer_norm", "silu", "layer_norm sigmoid", "gelu"])
@pytest.mark.parametrize("kernel", ["rendered", "compiled"])
def test_what_is_multiplied_by_a_matrix_takes_the_time_without(kernel: str, around: str) -> None:
    perf_model = PerfModel(MadeUp())
    for work in (PartKind.FORWARD, PartKind.BACKWARD):
        part = Part(work, kernel, 16384, 2048, recipe="bfloat16", around=f"{around} times")
        made, without = perf_model.part(part), perf_model.part(replace(part, around=around))
        assert made is not None
        assert without is not None
        assert (made.us, made.source) == (without.us, TimeSource.ESTIMATED)


@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_an_activation_without_a_recording_takes_the_time_of_another(activation: str) -> None:
    shipped = Measurements.shipped("h200")
    assert shipped is not None
    part = Part(PartKind.FORWARD, "rendered", 16384, 2048, recipe="bfloat16", around=f"layer_norm {activation}")
    perf_model = PerfModel(shipped)
    made, like = perf_model.part(part), perf_model.part(replace(part, around="layer_norm silu"))
    assert made is not None
    assert like is not None
    assert (made.us, made.source) == (like.us, TimeSource.ESTIMATED)


def test_a_slope_is_no_part_of_what_is_timed() -> None:
    chain = LinearChain(0, 1, (ChainStage("a", 0, activation="leaky_relu(0.2)"),))
    assert Rewrites(chains=[chain]).traced.around == {"a": Surroundings("", "leaky_relu")}


def test_a_matrix_that_multiplies_is_part_of_what_stands_around_a_site() -> None:
    head = ChainStage("a", 2, before_activation="silu", before_multiplier=local("u"), activation="relu")
    gate = ChainStage("b", 4, activation="sigmoid", multiplier=local("x"), dropout=Dropout(local("drop"), 0.1, 4))
    assert Rewrites(chains=[LinearChain(0, 7, (head, gate))]).traced.around == {
        "a": Surroundings("silu times", "relu", last=False),
        "b": Surroundings("relu", "sigmoid times dropout", first=False),
    }


# Of kernels that make FP8, and of torch.compile, on an H200.
@pytest.mark.parametrize(
    ("work", "kernel", "rows", "us"),
    [
        (PartKind.FORWARD, "rendered", 32768, 123.5),
        (PartKind.BACKWARD, "rendered", 32768, 161.3),
        (PartKind.FORWARD, "compiled", 32768, 160.0),
        (PartKind.BACKWARD, "compiled", 32768, 260.0),
    ],
)
def test_a_gelu_takes_longer_than_its_bytes(work: PartKind, kernel: str, rows: int, us: float) -> None:
    shipped = Measurements.shipped("h200")
    assert shipped is not None
    recipe = "e4m3 rowwise" if kernel == "rendered" else "bfloat16"
    made = PerfModel(shipped).part(Part(work, kernel, rows, 3072, recipe=recipe, around="gelu"))
    assert made is not None
    assert made.us == pytest.approx(us, rel=0.05)
    assert made.source is TimeSource.ESTIMATED


def test_a_gelu_that_was_measured_takes_its_own_time() -> None:
    part = Part(PartKind.FORWARD, "rendered", 4096, 3072, recipe="bfloat16", around="gelu")
    costs = MadeUp()
    made, own = PerfModel(costs).part(part), costs.time(part)
    assert made is not None
    assert own is not None
    assert made.us == own.us


def test_each_part_is_looked_up_once() -> None:
    costs = MadeUp()
    perf_model = PerfModel(costs)
    workload = workload_of(SIZES, Recipe.of(CHAIN), AROUND, True, False)
    first = perf_model.sum(workload.backward)
    asked = costs.asked
    assert perf_model.sum(workload.backward) == first
    assert costs.asked == asked


def test_a_sum_is_as_sure_as_its_least_sure_part_and_noises_add_up_as_squares() -> None:
    parts = (
        Part(PartKind.QUANTIZE, "rendered", 64, 64, recipe="e4m3 rowwise"),
        Part(PartKind.COPY, "rendered", 64, 64, recipe="bfloat16"),
    )
    perf_model = PerfModel(MadeUp(spread=0.1, factor=lambda part: 1.0 if part.work is PartKind.QUANTIZE else None))
    found, first, second = perf_model.sum(parts), perf_model.part(parts[0]), perf_model.part(parts[1])
    assert found is not None
    assert first is not None
    assert second is not None
    assert found.source is TimeSource.ESTIMATED
    assert found.us == pytest.approx(first.us + second.us)
    assert found.noise == pytest.approx((first.noise**2 + second.noise**2) ** 0.5)


@pytest.mark.parametrize("recipe", [AS_IS, CHAIN], ids=["native", "chain"])
def test_what_no_kernel_takes_behind_a_gemm_is_the_compilers(recipe) -> None:
    taken, left = (
        workload_of(SIZES, Recipe.of(recipe), replace(AROUND, takes_after=takes), True, False)
        for takes in (True, False)
    )
    for workload, kernel in ((taken, "rendered"), (left, "compiled")):
        parts = [part for part in (*workload.forward, *workload.backward) if part.around]
        assert {part.kernel for part in parts if part.columns == SIZES.n} == {kernel}
        assert {part.kernel for part in parts if part.columns == SIZES.k} == {"rendered"}
