"""Merging sites: what two trackers learned of parts is what one learned of the whole."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.probe.stats.merge import later_weight, merge_joint, merge_operands, merge_sites
from loka.probe.stats.site_stats import JointStats, OperandStats, SiteStats, WeightStats
from loka.probe.stats.weight_tracker import WeightTracker, weight_stats
from tests.support.learned_stats import joint_of, operand_of

K, N = 140, 6


def weight(step: int) -> WeightStats:
    tracker = WeightTracker(N, K, "cpu")
    tracker.update(torch.randn((N, K), generator=torch.Generator().manual_seed(step)), step)
    return weight_stats(tracker.snapshot())


def shards() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    left = [torch.randn((n, K), generator=generator) for n in (5, 31)]
    right = [torch.randn((n, K), generator=generator) * 4.0 + 100.0 for n in (1, 9, 70)]
    right[1][2, 3] = math.nan
    return left, right


def site(**parts: OperandStats | JointStats | WeightStats | None) -> SiteStats:
    empty = SiteStats("mlp.0", K, N, None, None, None, None)
    return dataclasses.replace(empty, **parts)


def test_operands_of_unequal_shifted_shards_merge_to_one_pass() -> None:
    left, right = shards()
    merged, whole = (
        merge_operands(operand_of(Operand.INPUT, *left), operand_of(Operand.INPUT, *right)),
        operand_of(Operand.INPUT, *left, *right),
    )
    for field in dataclasses.fields(OperandStats):
        a, b = getattr(merged, field.name), getattr(whole, field.name)
        if field.name == "moments":
            # Both were learned in float32 and differ by its rounding; the merging itself is tested in float64.
            assert a.count == b.count == 5 + 31 + 1 + 8 + 70
            torch.testing.assert_close(a.mean, b.mean, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(a.comoment, b.comoment, rtol=1e-4, atol=1e-4 * float(b.comoment.abs().max()))
        elif isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=field.name)
        else:
            assert a == b, field.name


def test_merging_leaves_its_arguments_alone() -> None:
    left, right = shards()
    a, b = operand_of(Operand.INPUT, *left), operand_of(Operand.INPUT, *right)
    before = a.values.clone(), a.moments.comoment.clone()
    merge_operands(a, b)
    assert torch.equal(a.values, before[0])
    assert torch.equal(a.moments.comoment, before[1])


def test_a_part_that_one_side_never_saw_is_taken_from_the_other() -> None:
    left, _ = shards()
    seen, grad = operand_of(Operand.INPUT, *left), operand_of(Operand.GRAD_OUTPUT, torch.ones(3, N))
    merged = merge_sites(site(input=seen), site(grad_output=grad, weight=weight(3)))
    assert merged.input is seen
    assert merged.grad_output is grad
    assert merged.joint is None
    assert merged.weight is not None
    assert merge_sites(site(), site()) == site()


def test_whole_sites_merge_part_by_part() -> None:
    left, right = shards()
    x = [torch.cat(left), right[2]]
    grads = [part[:, :N] * 0.1 for part in x]
    sites = [
        site(
            input=operand_of(Operand.INPUT, x[i]),
            grad_output=operand_of(Operand.GRAD_OUTPUT, grads[i]),
            joint=joint_of([x[i]], [grads[i]]),
            weight=weight(i),
        )
        for i in range(2)
    ]
    merged = merge_sites(sites[0], sites[1])
    whole = joint_of([torch.cat(x)], [torch.cat(grads)])
    assert merged.joint is not None
    assert merged.joint.moments.count == whole.moments.count == 106
    scale = float(whole.moments.comoment.abs().max())
    torch.testing.assert_close(merged.joint.moments.comoment, whole.moments.comoment, rtol=0, atol=1e-5 * scale)
    assert merged.grad_output is not None
    assert merged.grad_output.operand is Operand.GRAD_OUTPUT
    assert merged.grad_output.sampled == 106
    assert merged.weight is sites[1].weight


def test_the_weight_of_the_later_step_stays() -> None:
    early, late = weight(1), weight(2)
    assert later_weight(early, late) is late
    assert later_weight(late, early) is late
    assert later_weight(early, dataclasses.replace(late, step=1)) is early


def test_joint_moments_of_other_features_are_refused() -> None:
    with pytest.raises(InputError, match="joint moments are of different features"):
        merge_joint(*(joint_of([torch.ones(2, 4)], [torch.ones(2, n)]) for n in (3, 2)))
