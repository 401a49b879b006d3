"""Made-up profiles for tests of their files: every field is filled, and nothing was learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.numerics.enums import Format, Gemm, Operand, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.probe.profile import profile_file
from loka.probe.profile.profile import (
    Estimate,
    Finding,
    Interval,
    OperandSummary,
    Profile,
    Quantiles,
    RecordedStats,
    Shares,
    SiteProfile,
)
from loka.probe.stats.site_stats import (
    CHECKS,
    MAGNITUDE_BINS,
    RELATIVE_BINS,
    ROW_RMS_BINS,
    SKETCH,
    SPREAD_BINS,
    VALUE_BINS,
    VIEWS,
    JointStats,
    LowRank,
    Moments,
    OperandStats,
    SiteStats,
    WeightStats,
)

QUANTILES = Quantiles(0.5, 1.25, 1.5, 2.0, 3.125)


def make_operand(operand: Operand, width: int, seed: int = 0) -> OperandSummary:
    shares = tuple(Shares(view, format, 0.1 + seed / 7, 0.02) for view in VIEWS for format in Format)
    return OperandSummary(
        operand=operand,
        width=width,
        calls=20,
        rows=81920,
        sampled=10240,
        nonfinite=3,
        nonfinite_calls=1,
        zeros=1 / 3,
        amax=17.25 + seed,
        usual_amax=11.1,
        rms=0.7,
        magnitudes=tuple((i * 7919 + seed) % 1000 for i in range(MAGNITUDE_BINS)),
        shares=() if operand is Operand.WEIGHT else shares,
        row_spread=QUANTILES,
        block_spread=None,
        covariance_error=0.25,
    )


def make_estimates(count: int = 8) -> tuple[Estimate, ...]:
    recipes = [OperandRecipe(format, scaling) for format in Format for scaling in Scaling]
    return tuple(
        Estimate(
            gemm,
            (recipes[i % len(recipes)], recipes[0]),
            Interval(0.1 + i / 97, 0.09 + i / 97, 0.11 + i / 97),
            Interval(25.1 + i / 3, 24.9 + i / 3, 25.3 + i / 3),
            64,
        )
        for gemm in Gemm
        for i in range(count)
    )


def make_profile(sites: tuple[SiteProfile, ...]) -> Profile:
    finding = Finding("a", "overflowing_bias", "its bias has a norm of 3.2", "mods: [{use: no_bias}]")
    return Profile("ranker", "loka.zoo:ranker", "0.1.0", "2026-11-21T04:43:00Z", 6000, 100, 60, 4096, sites, (finding,))


def make_site(name: str, k: int, n: int) -> SiteProfile:
    operands = (
        make_operand(Operand.INPUT, k, 1),
        make_operand(Operand.WEIGHT, k, 2),
        make_operand(Operand.GRAD_OUTPUT, n, 3),
    )
    return SiteProfile(name, k, n, 4096, operands, make_estimates())


def counts(*shape: int) -> Tensor:
    return torch.randint(0, 10**12, shape)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def amaxes(*shape: int) -> Tensor:
    return floats(*shape).abs()


def make_moments(width: int) -> Moments:
    return Moments(12345, floats(width), amaxes(width), floats(width, width if width <= 512 else SKETCH + CHECKS))


def make_activation(operand: Operand, width: int) -> OperandStats:
    return OperandStats(
        operand=operand,
        calls=20,
        rows=10**10,
        sampled=12500,
        nonfinite=7,
        nonfinite_calls=2,
        moments=make_moments(width),
        values=counts(width, VALUE_BINS),
        relative=counts(len(VIEWS), RELATIVE_BINS),
        row_rms=counts(ROW_RMS_BINS),
        row_spread=counts(SPREAD_BINS),
        block_spread=counts(SPREAD_BINS),
        column_amax=amaxes(width),
        call_amax=counts(ROW_RMS_BINS),
    )


def make_weight(n: int, k: int) -> WeightStats:
    rows = torch.randn(min(n, 256), k)
    rows[0, 0] = math.nan  # kept as the weight has it
    return WeightStats(
        step=6000,
        updates=3,
        amax=1.5,
        nonfinite=1,
        row_mean=floats(n),
        column_mean=floats(k),
        u=LowRank(floats(n, min(n, 5)), amaxes(n), 0.125),
        v=LowRank(floats(k, min(k, 5)), amaxes(k), 0.0),
        row_index=torch.arange(min(n, 256)),
        rows=rows,
        column_index=torch.arange(min(k, 256)),
        columns=torch.randn(n, min(k, 256)),
        row_amax=amaxes(n),
        column_amax=amaxes(k),
        values=counts(VALUE_BINS),
    )


def make_stats(name: str, k: int, n: int) -> SiteStats:
    joint = JointStats(torch.arange(min(k, 128)), torch.arange(min(n, 128)), make_moments(min(k, 128) + min(n, 128)))
    activations = (make_activation(Operand.INPUT, k), make_activation(Operand.GRAD_OUTPUT, n))
    return SiteStats(name, k, n, *activations, joint, make_weight(n, k))


def make_recorded(*sizes: tuple[int, int]) -> RecordedStats:
    """Sites of the given (K, N), and one that never ran."""
    torch.manual_seed(0)
    stats = [make_stats(f"layers.{i}.mlp", k, n) for i, (k, n) in enumerate(sizes)]
    sites = [make_site(f"layers.{i}.mlp", k, n) for i, (k, n) in enumerate(sizes)]
    never = SiteProfile("never", 3, 4, 0, (), ())
    return RecordedStats(make_profile((*sites, never)), (*stats, SiteStats("never", 3, 4, None, None, None, None)))


def rewritten(path: Path, change: Callable[[str], str] = str, **tensors: Tensor | None) -> None:
    """Change the header or the tensors of a saved profile, and give it the checksum of that; None removes a tensor."""
    with safe_open(path, framework="pt") as opened:
        text = change(opened.metadata()[profile_file.METADATA])
    kept = {name: tensor for name, tensor in {**load_file(path), **tensors}.items() if tensor is not None}
    statistics = {name: kept[name] for name in kept if not name.startswith(profile_file.CHECKSUM)}
    save_file({**statistics, **profile_file._checksums(text, statistics)}, path, {profile_file.METADATA: text})


def as_version_2(path: Path) -> None:
    """Make a profile one of the version before."""
    rewritten(path, lambda text: text.replace(f'"version":{profile_file.VERSION}', '"version":2', 1))
