"""The JSON header of a profile file: a `Profile` as text and back, checked field by field.

Recipes are in a table, and an estimate refers to its two by index. The counts of magnitudes are in a tensor of the
file, one row for each operand in the order of the header. JSON has no infinities: the ends of an interval are a number,
"inf" or "-inf". No other number may be infinite, and none NaN (ranges.py).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from loka.errors import InputError
from loka.mods.fingerprint import ModFingerprint
from loka.numerics.enums import Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.probe.profile.profile import (
    VERSION,
    Estimate,
    Finding,
    Interval,
    NeEstimate,
    OperandSummary,
    Profile,
    Quantiles,
    Shares,
    SiteProfile,
)
from loka.probe.profile.ranges import DamagedError, check_profile, check_weights

FORMAT = "loka.profile"

Count = Annotated[int, Field(ge=0)]
_End = float | Literal["inf", "-inf"]
_Ends = tuple[_End, _End, _End]  # mean, low, high


@dataclass(frozen=True, slots=True)
class OperandCounts:
    """The scalar fields of a stats.OperandStats; `count` is that of its moments."""

    calls: Count
    rows: Count
    sampled: Count
    nonfinite: Count
    nonfinite_calls: Count
    count: Count


@dataclass(frozen=True, slots=True)
class WeightNumbers:
    """The scalar fields of a stats.WeightStats."""

    step: Count
    updates: Count
    amax: float
    nonfinite: Count
    u_error: float
    v_error: float


@dataclass(frozen=True, slots=True)
class SiteCounts:
    """The scalars of a stats.SiteStats; None for a part that was never seen. `joint` is the count of its moments."""

    input: OperandCounts | None
    grad_output: OperandCounts | None
    joint: Count | None
    weight: WeightNumbers | None


@dataclass(frozen=True, slots=True)
class _OperandRow:
    """An OperandSummary without its magnitudes."""

    operand: Operand
    width: Count
    calls: Count
    rows: Count
    sampled: Count
    nonfinite: Count
    nonfinite_calls: Count
    zeros: float
    amax: float
    usual_amax: float
    rms: float
    shares: tuple[Shares, ...]
    row_spread: Quantiles | None
    block_spread: Quantiles | None
    covariance_error: float


@dataclass(frozen=True, slots=True)
class _ProfileSiteRow:
    name: str
    k: Count
    n: Count
    rows: Count
    operands: tuple[_OperandRow, ...]
    estimates: tuple[tuple[Gemm, Count, Count, _Ends, _Ends, Count], ...]  # recipes by index; mere, sqnr_db; draws
    ne: tuple[tuple[Gemm, Count, Count, _Ends, float, _End | None], ...] = ()  # ne_percent; run_percent, varying_error


@dataclass(frozen=True, slots=True)
class _RecipeRow:
    """An OperandRecipe with the file's names of its fields."""

    format: Format
    scaling: Scaling
    range: Range
    amax: float | None
    power_of_two: bool
    turned: bool = False  # `OperandRecipe.transposed`; missing in profiles from before it existed


@dataclass(frozen=True, slots=True)
class _Header:
    """The layout of the header, versions 1 and 2."""

    format: str  # both are checked before the rest
    version: Annotated[int, Field(ge=1)]
    form: Literal["summary", "full"]
    name: str
    model: str
    loka_version: str
    created: str
    steps: Count
    every: Count
    samples: Count
    batch_size: Count
    recipes: tuple[_RecipeRow, ...]
    sites: tuple[_ProfileSiteRow, ...]
    findings: tuple[Finding, ...]
    stats: tuple[SiteCounts, ...] | None  # one per site; None in the summary form
    mods: tuple[ModFingerprint, ...] = ()  # older files without it are of models without mods
    synthetic: bool = False  # written only where it is true: older readers refuse fields that they do not know


@dataclass(frozen=True, slots=True)
class _Preamble:
    """The fields that decide if the rest can be read."""

    format: str
    version: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """A header as read: the profile lacks the magnitudes, which `with_magnitudes` adds."""

    profile: Profile
    stats: tuple[SiteCounts, ...] | None  # None: the summary form
    version: int


@cache
def _adapter() -> TypeAdapter[_Header]:
    return TypeAdapter(_Header)


@cache
def _preamble() -> TypeAdapter[_Preamble]:
    return TypeAdapter(_Preamble)


def to_text(profile: Profile, stats: tuple[SiteCounts, ...] | None) -> str:
    """The header of a profile: the same text for the same contents. `stats` makes it the full form.

    Raises InputError if a number is out of its range (ranges.py), or if two sites share a name.
    """
    _check_ranges(profile, stats)
    recipes: dict[OperandRecipe, int] = {}
    header = _Header(
        format=FORMAT,
        version=VERSION,
        form="summary" if stats is None else "full",
        name=profile.name,
        model=profile.model,
        loka_version=profile.loka_version,
        created=profile.created,
        steps=profile.steps,
        every=profile.every,
        samples=profile.samples,
        batch_size=profile.batch_size,
        sites=tuple(_site_row(site, recipes) for site in profile.sites),
        recipes=tuple(map(_recipe_row, recipes)),
        findings=profile.findings,
        stats=stats,
        mods=profile.mods,
        synthetic=profile.synthetic,
    )
    return _adapter().dump_json(header, exclude=None if profile.synthetic else {"synthetic"}).decode()


def from_text(text: str, file: str) -> Parsed:
    """Reads the text of `to_text`. `file` is the name in messages.

    Raises InputError for a header that is damaged, of something else, or of a newer LoKA.
    """
    again = "make the profile again with `loka probe`, or take it from where it was kept"
    try:
        header = _adapter().validate_json(text, strict=True)
        _check_origin(_Preamble(header.format, header.version), file)
        parsed = _parsed(header)
        _check_ranges(parsed.profile, parsed.stats)
    except ValidationError as error:
        _check_origin(_read_preamble(text, file, again), file)
        raise InputError(f"{file}: its header is damaged ({_first(error)}); {again}") from error
    except DamagedError as error:
        raise InputError(f"{file}: its header is damaged ({error}); {again}") from error
    return parsed


def _read_preamble(text: str, file: str, again: str) -> _Preamble:
    try:
        return _preamble().validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{file}: its header is damaged ({_first(error)}); {again}") from error


def _check_origin(preamble: _Preamble, file: str) -> None:
    """Raise InputError for a header of something else, or of a newer LoKA."""
    if preamble.format != FORMAT:
        raise InputError(f"{file}: holds {preamble.format!r}, not a profile of LoKA; name what `loka probe` wrote")
    if preamble.version > VERSION:
        raise InputError(
            f"{file}: the profile has version {preamble.version} and this LoKA reads up to {VERSION}; upgrade LoKA, "
            "or make the profile again with `loka probe`"
        )


def with_magnitudes(profile: Profile, counts: Sequence[Sequence[int]]) -> Profile:
    """The profile with row i of `counts` as the magnitudes of its i-th operand, over all sites in order."""
    rows = iter(counts)
    sites = []
    for site in profile.sites:
        operands = tuple(replace(operand, magnitudes=tuple(next(rows))) for operand in site.operands)
        sites.append(replace(site, operands=operands))
    return replace(profile, sites=tuple(sites))


def _site_row(site: SiteProfile, recipes: dict[OperandRecipe, int]) -> _ProfileSiteRow:
    def number(recipe: OperandRecipe) -> int:
        return recipes.setdefault(recipe, len(recipes))

    return _ProfileSiteRow(
        name=site.name,
        k=site.k,
        n=site.n,
        rows=site.rows,
        operands=tuple(
            _OperandRow(**{field.name: getattr(operand, field.name) for field in fields(_OperandRow)})
            for operand in site.operands
        ),
        estimates=tuple(
            (
                estimate.gemm,
                number(estimate.operands[0]),
                number(estimate.operands[1]),
                _ends(estimate.mere),
                _ends(estimate.sqnr_db),
                estimate.draws,
            )
            for estimate in site.estimates
        ),
        ne=tuple(
            (
                each.gemm,
                number(each.operands[0]),
                number(each.operands[1]),
                _ends(each.ne_percent),
                float(each.run_percent),
                None if each.varying_error is None else _end(each.varying_error),
            )
            for each in site.ne
        ),
    )


def _parsed(header: _Header) -> Parsed:
    if (header.form == "full") != (header.stats is not None):
        raise DamagedError(f"form is {header.form!r}, which does not fit the statistics in it")
    if header.stats is not None and len(header.stats) != len(header.sites):
        raise DamagedError(f"statistics of {len(header.stats)} sites, but {len(header.sites)} sites")
    recipes = tuple(map(_recipe, header.recipes))
    profile = Profile(
        name=header.name,
        model=header.model,
        loka_version=header.loka_version,
        created=header.created,
        steps=header.steps,
        every=header.every,
        samples=header.samples,
        batch_size=header.batch_size,
        sites=tuple(_site(row, recipes) for row in header.sites),
        findings=header.findings,
        mods=header.mods,
        synthetic=header.synthetic,
    )
    return Parsed(profile, header.stats, header.version)


def _site(row: _ProfileSiteRow, recipes: tuple[OperandRecipe, ...]) -> SiteProfile:
    def pair(first: int, second: int) -> OperandPair:
        if max(first, second) >= len(recipes):
            raise DamagedError(f"site {row.name!r} names recipe {max(first, second)} of {len(recipes)}")
        return recipes[first], recipes[second]

    estimates = tuple(
        Estimate(gemm, pair(first, second), _interval(mere), _interval(sqnr_db), draws)
        for gemm, first, second, mere, sqnr_db, draws in row.estimates
    )
    ne = tuple(
        NeEstimate(
            gemm, pair(first, second), _interval(ne_percent), run_percent, None if error is None else float(error)
        )
        for gemm, first, second, ne_percent, run_percent, error in row.ne
    )
    operands = tuple(
        OperandSummary(**{field.name: getattr(operand, field.name) for field in fields(_OperandRow)}, magnitudes=())
        for operand in row.operands
    )
    return SiteProfile(row.name, row.k, row.n, row.rows, operands, estimates, ne)


def _recipe_row(recipe: OperandRecipe) -> _RecipeRow:
    around = (recipe.format, recipe.scaling, recipe.range, recipe.amax, recipe.power_of_two)
    return _RecipeRow(*around, turned=recipe.transposed)


def _recipe(row: _RecipeRow) -> OperandRecipe:
    around = (row.format, row.scaling, row.range, row.amax, row.power_of_two)
    return OperandRecipe(*around, transposed=row.turned)


def _ends(interval: Interval) -> _Ends:
    return (_end(interval.mean), _end(interval.low), _end(interval.high))


def _end(value: float) -> _End:
    """An end of an interval; integers are written as floats, as they are read back."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return float(value)


def _interval(ends: _Ends) -> Interval:
    mean, low, high = ends
    return Interval(float(mean), float(low), float(high))


def _check_ranges(profile: Profile, stats: tuple[SiteCounts, ...] | None) -> None:
    check_profile(profile)
    check_weights((site.name, counts.weight) for site, counts in zip(profile.sites, stats or (), strict=False))
    for site, counts in zip(profile.sites, stats or (), strict=False):
        numbers = [each for part in (counts.input, counts.grad_output) if part is not None for each in astuple(part)]
        if any(number > _MOST for number in [*numbers, counts.joint or 0]):
            raise DamagedError(f"a count of the site {reprlib.repr(site.name)} is larger than any run's")


_MOST = 1 << 62  # rows, calls


def _first(error: ValidationError) -> str:
    """The first of pydantic's errors, with its path."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    return f"{place}: {found['msg']}" if place else found["msg"]
