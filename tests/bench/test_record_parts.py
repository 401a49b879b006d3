"""The parts of the set that ships, and how those that are no GEMMs are run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loka.bench.packages import Workshop
from loka.bench.record.check_numbers import Check
from loka.bench.record.grid import POWERS, WIDE, WIDTHS, gemm_sizes, grid
from loka.bench.record.interaction_parts import specs_of as interaction_specs
from loka.bench.record.producer_parts import Producers, parse_around, parse_written, specs_of
from loka.bench.record.run_record import rendered
from loka.errors import InputError
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind
from tests.support.plan.recorded_parts import PARTS, WIDTH


@pytest.fixture(scope="module")
def producers() -> Iterator[Producers]:
    """The parts' kernels as operators, which run their references on the CPU."""
    with Workshop() as workshop:
        yield Producers(workshop.kernels(rendered(PARTS)), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_kind_of_part_can_be_run_and_agrees_with_its_reference(producers: Producers, part: Part) -> None:
    prepared = producers.prepare(part)
    made = prepared.call(*prepared.arguments)
    assert prepared.check(made) == Check()


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part.work is not PartKind.COPY], ids=str)
def test_wrong_rows_are_found(producers: Producers, part: Part) -> None:
    prepared = producers.prepare(part)
    made = prepared.call(*prepared.arguments)
    first = made[0] if isinstance(made, tuple | list) else made
    first.copy_(first.roll(1, 0))
    assert "dB against its reference" in prepared.check(made).wrong


def test_wrong_sums_are_found(producers: Producers) -> None:
    part = Part(PartKind.BACKWARD, "rendered", 96, WIDTH, recipe="bfloat16", around="layer_norm")
    prepared = producers.prepare(part)
    made = prepared.call(*prepared.arguments)
    made[1].mul_(1.5)
    assert "dweight" in prepared.check(made).wrong


def test_a_backward_is_timed_with_the_reduction_of_its_sums() -> None:
    part = Part(PartKind.BACKWARD, "rendered", 96, WIDTH, recipe="e4m3 rowwise", around="layer_norm")
    assert [spec.function for spec in specs_of(part)] == ["layer_norm_backward_e4m3", "reduce"]
    unweighted = Part(PartKind.BACKWARD, "rendered", 96, WIDTH, recipe="bfloat16", around="relu")
    assert len(specs_of(unweighted)) == 1


def test_one_scale_takes_two_launches() -> None:
    part = Part(PartKind.QUANTIZE, "rendered", 96, WIDTH, recipe="e4m3 tensorwise")
    assert [spec.function for spec in specs_of(part)] == [
        "quantize_maximum",
        "quantize_e4m3_tensorwise",
    ]


@pytest.mark.parametrize("text", ["layer_norm rms_norm", "silu relu", "softmax", "layer_norm, silu"])
def test_no_kernel_is_rendered_for_what_is_not_known(text: str) -> None:
    with pytest.raises(InputError, match="what stands around a GEMM"):
        parse_around(text)


@pytest.mark.parametrize("recipe", ["", "e4m3", "int8", "e4m3 blockwise_128x128", "e3m4 rowwise"])
def test_what_no_kernel_writes_is_refused(recipe: str) -> None:
    with pytest.raises(InputError, match="no kernel writes"):
        parse_written(recipe)


def test_the_grid_holds_the_cube_of_the_crossover_map() -> None:
    sizes = set(gemm_sizes())
    assert {(m, n, k) for m in POWERS for n in POWERS for k in POWERS} <= sizes
    assert (POWERS[0], POWERS[-1]) == (64, 8192)
    assert {(2048, 256, 768), (2048, 1024, 123200)} <= sizes


def test_every_part_of_the_grid_can_be_prepared_for() -> None:
    parts = grid()
    assert len(set(parts)) == len(parts)
    for part in parts:
        if part.work in INTERACTIONS:
            assert interaction_specs(part)
        elif part.work is not PartKind.GEMM:
            assert specs_of(part) or part.work is PartKind.COPY
        else:
            assert part.kernel in ("torch.scaled_mm", "as-is")
    assert {part.columns for part in grid(("forward",))} == {*WIDTHS, *(width for _, width in WIDE)}


def test_kinds_of_parts_can_be_chosen() -> None:
    assert {part.work for part in grid(("turn", "copy"))} == {PartKind.REQUANTIZE_TRANSPOSE, PartKind.COPY}
    assert any(part.kernel == "fbgemm.rowwise" for part in grid(("gemm",), ("fbgemm.rowwise",)))
    with pytest.raises(InputError, match="no parts of the kind 'gemms'"):
        grid(("gemms",))
