"""The summary of a site against the same numbers worked out from the whole tensors, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.errors import InputError
from loka.mods.adaptation import ModFingerprint
from loka.numerics.enums import Format, Operand, Scaling
from loka.numerics.quantize import FORMATS, expand_scale, quantize
from loka.probe.profile import summarise
from loka.probe.profile.profile import OperandSummary, Profile, Quantiles, RecordedStats, SiteProfile
from loka.probe.stats.site_stats import (
    LOWEST,
    MAGNITUDE_BINS,
    ROW_RMS_BINS,
    SPREAD_BINS,
    SPREAD_STEPS,
    VALUE_BINS,
    ZERO_BIN,
    HistogramView,
    OperandStats,
    SiteStats,
    WeightStats,
)
from tests.support.learned_stats import operand_of, weight_of


def site_with(
    activation: OperandStats | None, gradient: OperandStats | None = None, k: int = 0, n: int = 4
) -> SiteStats:
    width = activation.moments.mean.numel() if activation is not None else k
    return SiteStats("a", width, n, activation, gradient, None, None)


def summary_of(calls: list[Tensor], operand: Operand = Operand.INPUT) -> OperandSummary:
    stats = operand_of(operand, *calls)
    (found,) = summarise.summarise(replace(site_with(stats), input=stats), (), 64).operands
    return found


def heavy_tailed(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    scale = torch.randn(rows, 1, generator=generator).mul(2).exp2() * torch.randn(width, generator=generator).exp2()
    x = x * x.abs().pow(1.5) * scale
    return torch.where(torch.rand(rows, width, generator=generator) < 0.2, 0.0, x)


class TestActivation:
    def test_numbers_of_all_elements(self) -> None:
        calls = [heavy_tailed(50, 40, seed) for seed in range(5)]
        x = torch.cat(calls).double()
        found = summary_of(calls)
        assert (found.operand, found.width, found.calls, found.rows, found.sampled) == (Operand.INPUT, 40, 5, 250, 250)
        assert (found.nonfinite, found.nonfinite_calls, found.covariance_error) == (0, 0, 0.0)
        assert found.zeros == (x == 0).double().mean().item()
        assert found.amax == x.abs().max().item()
        assert found.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-4)

    @pytest.mark.parametrize("calls", [1, 4, 7])
    def test_usual_amax_is_the_median_of_calls(self, calls: int) -> None:
        data = [heavy_tailed(30, 8, seed) * 2.0 ** (seed % 3) for seed in range(calls)]
        found = summary_of(data)
        ordered = sorted(rows.abs().max().item() for rows in data)
        median = ordered[(calls - 1) // 2]
        assert abs(math.log2(found.usual_amax / median)) <= 0.5 / SPREAD_STEPS + 1e-6
        assert found.usual_amax <= found.amax

    @pytest.mark.parametrize("operand", [Operand.INPUT, Operand.GRAD_OUTPUT])
    def test_magnitudes_fold_both_signs(self, operand: Operand) -> None:
        x = heavy_tailed(200, 16, 3) * (2.0**-15 if operand is Operand.GRAD_OUTPUT else 1.0)
        found = summary_of([x], operand)
        expected = [0] * MAGNITUDE_BINS
        for value in x.flatten().tolist():
            if value:
                mantissa, exponent = math.frexp(abs(value))
                place = 2 * (exponent - 1 - LOWEST[operand]) + (mantissa >= 0.75)
                expected[min(max(place, 0), MAGNITUDE_BINS - 1)] += 1
        assert found.magnitudes == tuple(expected)

    @given(seed=st.integers(0, 10**6), width=st.sampled_from([1, 7, 128, 200]), power=st.floats(0.5, 6.0))
    @example(seed=1161, width=200, power=4.978184654131114)
    @settings(max_examples=25, deadline=None)
    def test_shares_are_what_the_quantizer_does(self, seed: int, width: int, power: float) -> None:
        """Underflow and subnormal shares of each view, against the reference quantizer on the same tensor."""
        x = heavy_tailed(96, width, seed)
        x = x.sign() * x.abs().pow(power).clamp(max=1e20)
        found = summary_of([x])
        assert len(found.shares) == len(HistogramView) * len(Format)
        for share in found.shares:
            matrix = x.t() if share.view is HistogramView.COLUMNWISE else x
            scaling = Scaling.ROWWISE if share.view is HistogramView.COLUMNWISE else Scaling(share.view)
            quantized = quantize(matrix, format=share.format, scaling=scaling)
            values = quantized.values.float()
            lost = (values == 0) & (matrix != 0)
            # What lies within a rounding of the middle between zero and the smallest number may fall either way.
            middle = FORMATS[share.format].smallest_subnormal / 2
            quotient = matrix.double().abs() / expand_scale(quantized.scale, *matrix.shape).double()
            distance = quotient / middle - 1
            tied = (distance.abs() < 2.0**-21).double().mean().item()
            assert share.underflow == pytest.approx(lost.double().mean().item(), abs=tied + 1e-12)
            poor = (values != 0) & (values.abs() < FORMATS[share.format].smallest_normal)
            # Just below the smallest normal, a subnormal is rounded up to it.
            edge = (values.abs() == FORMATS[share.format].smallest_normal).double().mean().item()
            least = poor.double().mean().item()
            assert least - 1e-12 <= share.subnormal <= least + edge + 1e-12

    def test_spreads(self) -> None:
        x = heavy_tailed(400, 256, 1)
        x[::10] = 0.0
        found = summary_of([x])
        rows = x[x.any(1)].double()
        blocks = rows.reshape(-1, 128)
        assert found.row_spread is not None
        assert found.block_spread is not None
        for quantiles, matrix in ((found.row_spread, rows), (found.block_spread, blocks)):
            spread = (matrix.abs().amax(1) / matrix.square().mean(1).sqrt()).log2()
            for name, level in (("p1", 0.01), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p99", 0.99)):
                assert getattr(quantiles, name) == pytest.approx(spread.quantile(level).item(), abs=1.0 / SPREAD_STEPS)

    def test_quantiles_lie_linearly_within_a_bin(self) -> None:
        stats = operand_of(Operand.INPUT, torch.ones(4, 8))
        counts = torch.zeros(SPREAD_BINS, dtype=torch.int64)
        counts[0] = 1000  # rows of zeros have no spread
        counts[1 + 8] = 100  # one octave and up
        (found,) = summarise.summarise(site_with(replace(stats, row_spread=counts)), (), 4).operands
        step = 1.0 / SPREAD_STEPS
        expected = [1 + step * level for level in (0.01, 0.25, 0.5, 0.75, 0.99)]
        assert found.row_spread == Quantiles(*(pytest.approx(value) for value in expected))

    def test_all_zeros(self) -> None:
        found = summary_of([torch.zeros(10, 8)])
        assert (found.zeros, found.amax, found.usual_amax, found.rms) == (1.0, 0.0, 0.0, 0.0)
        assert set(found.magnitudes) == {0}
        assert {(share.underflow, share.subnormal) for share in found.shares} == {(0.0, 0.0)}
        assert found.row_spread is None
        assert found.block_spread is None

    def test_calls_without_rows(self) -> None:
        found = summary_of([torch.zeros(0, 8)])
        assert (found.calls, found.sampled, found.zeros, found.amax, found.rms) == (1, 0, 0.0, 0.0, 0.0)

    def test_one_row(self) -> None:
        found = summary_of([torch.tensor([[3.0, -4.0]])])
        assert found.amax == 4.0
        assert found.usual_amax == pytest.approx(4.0, rel=0.05)
        assert found.rms == pytest.approx(math.sqrt(12.5))

    def test_non_finite_elements_poison_nothing(self) -> None:
        x = heavy_tailed(64, 16, 5)
        bad = x.clone()
        bad[3, 4], bad[5, 6], bad[5, 7] = math.nan, math.inf, -math.inf
        found = summary_of([x, bad])
        assert (found.nonfinite, found.nonfinite_calls, found.calls) == (3, 1, 2)
        assert found.amax == x.abs().max().item()
        assert math.isfinite(found.rms)

    def test_amax_where_no_call_was_finite(self) -> None:
        """It is known by its bin alone, of half an octave."""
        x = heavy_tailed(64, 16, 5)
        x[0, 0] = math.inf
        finite = x[x.isfinite()].abs().max().item()
        assert finite / 1.5 <= summary_of([x]).amax <= finite

    def test_wide_operands_tell_the_error_of_their_covariance(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(300, 600, generator=generator)
        assert 0.1 < summary_of([x]).covariance_error < 1.0
        line = torch.randn(300, 1, generator=generator) * torch.randn(1, 600, generator=generator)
        assert summary_of([line]).covariance_error < 1e-3


def make_weight(weight: Tensor) -> WeightStats:
    values = torch.zeros(VALUE_BINS, dtype=torch.int64)
    values[ZERO_BIN] = (weight == 0).sum()
    values[ZERO_BIN + 1 + 2 * 40] = (weight > 0).sum()  # [1, 1.5)
    values[ZERO_BIN - 1 - 2 * 40] = (weight < 0).sum()
    made = weight_of(weight, nonfinite=2, values=values)
    return replace(made, u=replace(made.u, error=0.25), v=replace(made.v, error=0.5))


class TestWeight:
    def test_numbers(self) -> None:
        weight = torch.tensor([[1.0, 1.25, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, math.nan, 0.0]])
        stats = replace(site_with(None, k=4, n=3), weight=replace(make_weight(weight), amax=1.25))
        (found,) = summarise.summarise(stats, (), 64).operands
        assert (found.operand, found.width, found.rows, found.sampled, found.calls) == (Operand.WEIGHT, 4, 3, 3, 0)
        assert (found.nonfinite, found.amax, found.usual_amax, found.shares) == (2, 1.25, 1.25, ())
        assert found.covariance_error == 0.5
        assert found.zeros == 7 / 11
        assert found.magnitudes[80] == 4
        assert sum(found.magnitudes) == 4
        assert found.rms == pytest.approx(math.sqrt((3 + 1.25**2) / 12))
        assert found.row_spread is not None
        assert found.row_spread.p99 == pytest.approx(1.0, abs=0.01)  # one of four: amax is twice the rms

    def test_the_order_of_operands(self) -> None:
        x = torch.ones(4, 8)
        stats = replace(
            site_with(operand_of(Operand.INPUT, x), operand_of(Operand.GRAD_OUTPUT, x), n=8),
            weight=make_weight(torch.ones(8, 8)),
        )
        names = [operand.operand for operand in summarise.summarise(stats, (), 4).operands]
        assert names == [Operand.INPUT, Operand.WEIGHT, Operand.GRAD_OUTPUT]


def test_a_site_that_never_ran() -> None:
    assert summarise.summarise(site_with(None, k=7, n=5), (), 0) == SiteProfile("a", 7, 5, 0, (), ())


def record(stats: SiteStats, steps: int, every: int = 10, model: str = "m:f", rows: int = 64) -> RecordedStats:
    site = summarise.summarise(stats, (), rows)
    created = f"2026-11-{steps % 28 + 1:02d}T00:00:00Z"
    profile = Profile(f"p{steps}", model, "0.1.0", created, steps, every, steps // every, rows, (site,), ())
    return RecordedStats(profile, (stats,))


class TestUnite:
    def test_gives_the_summary_of_one_pass(self) -> None:
        calls = [heavy_tailed(40, 24, seed) * 1.5**seed + seed for seed in range(7)]
        whole = summary_of(calls)
        a, b = (
            record(site_with(operand_of(Operand.INPUT, *part)), steps)
            for part, steps in ((calls[:2], 20), (calls[2:], 50))
        )
        both = summarise.unite(a, b)
        (found,) = both.profile.sites[0].operands
        assert replace(found, rms=0.0) == replace(whole, rms=0.0)
        assert found.rms == pytest.approx(whole.rms, rel=1e-5)
        assert (both.profile.steps, both.profile.samples, both.profile.every) == (50, 7, 10)
        assert (both.profile.name, both.profile.created) == ("p50", "2026-11-23T00:00:00Z")

    def test_order_matters_little(self) -> None:
        a, b = (
            record(site_with(operand_of(Operand.INPUT, torch.ones(3, 4))), 20),
            record(site_with(operand_of(Operand.INPUT, torch.ones(5, 4))), 50, every=25),
        )
        assert summarise.unite(a, b).profile == summarise.unite(b, a).profile
        assert summarise.unite(a, b).profile.every == 25

    def test_a_site_that_ran_in_one_alone(self) -> None:
        ran, never = (
            record(site_with(operand_of(Operand.INPUT, torch.ones(3, 4))), 20),
            record(site_with(None, k=4), 50, rows=0),
        )
        both = summarise.unite(ran, never).profile.sites[0]
        assert both.operands == ran.profile.sites[0].operands
        assert both.rows == 64

    def test_estimates_and_findings_are_left_out(self) -> None:
        a = record(site_with(operand_of(Operand.INPUT, torch.ones(3, 4))), 20)
        estimated = replace(a, profile=replace(a.profile, findings=("stale",)))
        assert summarise.unite(estimated, a).profile.findings == ()

    def test_keeps_the_mods_and_refuses_others(self) -> None:
        a = record(site_with(None, k=4), 20)
        mods = (
            ModFingerprint("block_norm", "0123456789abcdef", "norm, block 32"),
            ModFingerprint("no_bias", "0" * 16, "up"),
        )
        modded = replace(a, profile=replace(a.profile, mods=mods))
        assert summarise.unite(modded, modded).profile.mods == mods
        with pytest.raises(InputError, match="cannot be merged: what block_norm, no_bias changed in m:f is not"):
            summarise.unite(a, modded)
        fewer = replace(a, profile=replace(a.profile, mods=mods[:1]))
        with pytest.raises(InputError, match="what no_bias changed in m:f"):
            summarise.unite(modded, fewer)

    def test_refuses_what_does_not_belong_together(self) -> None:
        a = record(site_with(None, k=4), 20)
        with pytest.raises(InputError, match="two models cannot be merged: m:f and m:g; merge runs of one"):
            summarise.unite(a, record(site_with(None, k=4), 20, model="m:g"))
        with pytest.raises(InputError, match="'a' has K = 4, N = 4 in one profile and K = 5, N = 4 in the other"):
            summarise.unite(a, record(site_with(None, k=5), 20))
        other = record(replace(site_with(None, k=4), name="b"), 20)
        for pair in ((a, other), (other, a)):
            with pytest.raises(InputError, match="is in only one of the two profiles"):
                summarise.unite(*pair)


def test_row_rms_bins_and_call_amax_share_their_edges() -> None:
    """An amax in the bin of 2^0 is called its geometric middle."""
    stats = operand_of(Operand.INPUT, torch.ones(4, 8) * 1.05)
    assert stats.call_amax.shape == (ROW_RMS_BINS,)
    (found,) = summarise.summarise(site_with(stats), (), 4).operands
    assert found.usual_amax == pytest.approx(2.0 ** (0.5 / SPREAD_STEPS))
