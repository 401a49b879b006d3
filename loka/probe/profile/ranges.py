"""Valid ranges of a profile's numbers: values that a Probe cannot produce are refused, on saving and on loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass

from loka.errors import InputError
from loka.probe.profile.profile import Estimate, Interval, NeEstimate, OperandSummary, Profile

_SHARES = ("zeros", "underflow", "subnormal")


class DamagedError(InputError):
    """A number is out of its range, or a field contradicts others."""


def check_profile(profile: Profile) -> None:
    """Raise DamagedError at the first number out of its range, and for duplicate names of sites.

    NaN is never allowed, and infinity only in intervals.
    """
    names: set[str] = set()
    for site in profile.sites:
        if site.name in names:
            raise DamagedError(f"two sites are called {site.name!r}")
        names.add(site.name)
        for operand in site.operands:
            if not _is_good(operand):
                _check_figures(site.name, _floats(operand, operand.operand))
        for estimate in site.estimates:
            _check_estimate(site.name, estimate)
        for each in site.ne:
            _check_ne(site.name, each)


def check_weights(weights: Iterable[tuple[str, object]]) -> None:
    """Raise DamagedError at the first number out of its range. `weights` has pairs: a site's name and its numbers."""
    for site, numbers in weights:
        _check_figures(site, _floats(numbers, "weight"))


def _is_good(operand: OperandSummary) -> bool:
    """True if all numbers are in range. They are listed explicitly: a profile of many sites has millions."""
    figures = [operand.amax, operand.usual_amax, operand.rms, operand.covariance_error]
    for spread in (operand.row_spread, operand.block_spread):
        if spread is not None:
            figures += (spread.p1, spread.p25, spread.p50, spread.p75, spread.p99)
    shares = [operand.zeros]
    for each in operand.shares:
        shares += (each.underflow, each.subnormal)
    return all(0.0 <= figure < math.inf for figure in figures) and all(0.0 <= share <= 1.0 for share in shares)


def _check_figures(site: str, floats: Iterable[tuple[str, float]]) -> None:
    """Statistics are finite and 0 or more; shares are at most 1."""
    for path, value in floats:
        _check(site, path, value, math.isfinite, "but must be finite")
        _check(site, path, value, lambda value: value >= 0.0, "but must be 0 or more")
        if path.rpartition(".")[2] in _SHARES:
            _check(site, path, value, lambda value: value <= 1.0, "but must be 1 or less")


def _check_estimate(site: str, estimate: Estimate) -> None:
    """MERE is 0 or more. An infinite MERE comes with an SQNR of -inf: a result that is not finite has both."""
    mere, sqnr = estimate.mere, estimate.sqnr_db
    name = f"the {estimate.gemm} estimate"
    if any(map(math.isnan, (mere.mean, mere.low, mere.high, sqnr.mean, sqnr.low, sqnr.high))):
        for path, value in _floats(estimate, name):
            _check(site, path, value, lambda value: not math.isnan(value), "but must be one")
    _check(site, f"{name}.mere.low", mere.low, lambda value: value >= 0.0, "but must be 0 or more")
    for field, each in (("mere", mere), ("sqnr_db", sqnr)):
        _check_interval(site, f"{name}.{field}", each)
    if mere.mean == math.inf and sqnr.mean != -math.inf:
        raise DamagedError(f"site {site!r}: {name}.mere.mean is inf, but its sqnr_db.mean is {sqnr.mean}, not -inf")
    for recipe in estimate.operands:
        if recipe.amax is not None:
            _check_figures(site, ((f"{name}.operands.amax", recipe.amax),))


def _check_ne(site: str, estimate: NeEstimate) -> None:
    """The change of NE is an interval, and infinite where a result was not finite; the rest is 0 or more."""
    name, found = f"the NE estimate of {estimate.gemm}", estimate.ne_percent
    for path, value in _floats(estimate, name):
        _check(site, path, value, lambda value: not math.isnan(value), "but must be one")
    _check_interval(site, f"{name}.ne_percent", found)
    _check_figures(site, ((f"{name}.run_percent", estimate.run_percent),))
    error = estimate.varying_error or 0.0
    _check(site, f"{name}.varying_error", error, lambda value: value >= 0.0, "but must be 0 or more")


def _check_interval(site: str, path: str, found: Interval) -> None:
    """The mean lies within the ends; an infinite mean has the same ends."""
    infinite = math.isinf(found.mean) and not found.low == found.mean == found.high
    if infinite or not found.low <= found.mean <= found.high:
        raise DamagedError(
            f"site {site!r}: {path} is {found.mean} within {found.low} to {found.high}, which is no interval"
        )


def _check(site: str, path: str, value: float, good: Callable[[float], bool], words: str) -> None:
    if not good(value):
        raise DamagedError(f"site {site!r}: {path} is {value}, {words}")


def _floats(value: object, path: str) -> Iterator[tuple[str, float]]:
    """All floats in a dataclass or tuple, with their paths."""
    if isinstance(value, float):
        yield path, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _floats(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple) and value and not isinstance(value[0], int):
        for item in value:
            yield from _floats(item, path)
