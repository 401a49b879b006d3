"""What `loka bench model` compares, in which order, and how it is chosen."""

from __future__ import annotations

import pytest

from loka.bench.model.model_variants import (
    MODEL_BASELINE,
    MODEL_VARIANTS,
    Casting,
    StepBlock,
    StepLaunch,
    chosen_blocks,
    chosen_variants,
    in_measuring_order,
)
from loka.errors import InputError

LOOP, GRAPHS, CAPTURED = StepLaunch


def test_the_baseline_is_measured_whatever_is_chosen() -> None:
    assert [variant.name for variant in chosen_variants("loka-fp8, tf32")] == ["tf32", MODEL_BASELINE, "loka-fp8"]
    assert chosen_variants(None) == MODEL_VARIANTS
    with pytest.raises(InputError, match=r"--variants: there is no 'bf61'.*did you mean bf16"):
        chosen_variants("bf61")


def test_blocks_without_a_graph_come_first() -> None:
    blocks = chosen_blocks(None, None)
    assert [(block.launch, block.mode) for block in blocks] == [
        (launch, mode) for launch in StepLaunch for mode in ("train", "infer")
    ]
    assert {block.casting for block in blocks} == {Casting.AUTOCAST}


def test_modes_launches_and_castings_are_chosen_by_name() -> None:
    assert chosen_blocks("captured,train,loop", "bfloat16") == (
        StepBlock(Casting.BFLOAT16, True, LOOP),
        StepBlock(Casting.BFLOAT16, True, CAPTURED),
    )
    assert [block.label for block in chosen_blocks("infer,loop", "bfloat16,autocast")] == [
        "infer autocast loop",
        "infer bfloat16 loop",
    ]


def test_the_baseline_is_measured_first_and_tuning_last() -> None:
    names = [variant.name for variant in in_measuring_order(MODEL_VARIANTS, GRAPHS)]
    assert names[0] == MODEL_BASELINE
    assert names[1:4] == ["loka-fp8", "loka-bf16", "loka-fp8-functions"]
    assert names[-3:] == ["tf32", "bf16-max-autotune", "tf32-max-autotune"]
    assert "bf16-eager" not in names
