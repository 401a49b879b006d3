"""Tables of `loka probe`: a line per GEMM for sites that are alike, and one entry for findings that are alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loka.cli.output import print_line, print_table
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import OperandPair
from loka.plan.format import common_pattern, format_ne, pattern_of
from loka.policy.patterns import compile_pattern
from loka.probe.estimate import recipe_label
from loka.probe.finding_evidence import estimate_of
from loka.probe.profile.profile import Estimate, Finding, Interval, NeEstimate, Profile, SiteProfile, Verdict

if TYPE_CHECKING:
    from loka.cli.probe_run import Learned
    from loka.cli.profile_paths import Places
    from loka.plan.examine import Examined
    from loka.policy.settings import SiteSettings
    from loka.probe.drift import SiteDrift
    from loka.sites.site import Site

COLUMNS = ("site", "count", "M", "K", "N", "GEMM", "recipe", "MERE", "95 %", "SQNR, dB", "95 % ", "NE", "verdict")
_NE = COLUMNS.index("NE")
NUMBERS = ("count", "M", "K", "N", "MERE", "SQNR, dB")
MANY = 12  # operands that --check shows at least, those that moved most first

_NUMBER = re.compile(r"(?<![a-zA-Z])\d[\d.]*(?:e[+-]?\d+)?|\binf\b")
_MOD = re.compile(r'mods: \[\{use: (\w+), match: ("(?:[^"\\]|\\.)*")\}\]')  # a remedy that is a mod
_WORST_FIRST = (Verdict.UNSAFE, Verdict.UNDECIDED, Verdict.SAFE)


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """A site of the policy with its settings and its profile."""

    site: Site
    settings: SiteSettings
    profile: SiteProfile | None  # None: not watched


def show_sites(examined: Examined, profile: Profile) -> None:
    """Print MERE and SQNR of each GEMM that is not kept, in its recipe; a line shows the worst of its sites."""
    groups = _groups(examined, profile)
    lines = []
    for rows in groups:
        site = rows[0].site
        m = str(site.rows.at(profile.batch_size)) + (f" x{site.calls}" if site.calls != 1 else "")
        name = site.name if len(rows) == 1 else common_pattern([row.site.name for row in rows])
        head: tuple[str, ...] = (name, str(len(rows)), m, str(site.k), str(site.n))
        for cells in _gemm_lines(rows):
            lines.append((*head, *cells))
            head = ("",) * len(head)
    columns: tuple[str, ...] = COLUMNS
    if not any(line[_NE] for line in lines):
        columns, lines = _without_ne(columns), [_without_ne(line) for line in lines]
    print_table(columns, lines, NUMBERS)
    if any(len(rows) > 1 for rows in groups):
        print_line("A line for several sites shows the worst of them.")


def show_findings(findings: Sequence[Finding], names: Sequence[str], modules: Sequence[str]) -> None:
    """Print findings once for sites that are alike, with the evidence of the first and a remedy for all.

    `names`: all sites. `modules`: all modules, which a mod's pattern is matched against.
    """
    for group in group_findings(findings):
        first = group[0]
        sites = list(dict.fromkeys(finding.site for finding in group))
        pattern, matched = _pattern(sites, names)
        more = "" if len(sites) == 1 else f", {len(sites)} sites"
        print_line(f"{first.kind}: {pattern}{more}")
        print_line(f"    {first.evidence if len(sites) == 1 else f'{first.site}: {first.evidence}'}")
        if _MOD.fullmatch(first.remedy):
            print_line(f"    {_mod_for_all(group, modules)}")
        else:
            print_line(f"    {first.remedy.replace(json.dumps(first.site), matched)}")
    if findings:
        print()


def group_findings(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups of findings that differ only in numbers, including those in sites' names."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        mod = _MOD.fullmatch(finding.remedy)
        remedy = finding.remedy.replace(finding.site, "") if mod is None else pattern_of(str(json.loads(mod[2])))
        key = (finding.kind, pattern_of(finding.site), _NUMBER.sub("#", finding.evidence), remedy)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _mod_for_all(group: Sequence[Finding], modules: Sequence[str]) -> str:
    """The mod that several findings propose, with a `match` for exactly their modules."""
    found = [mod for finding in group if (mod := _MOD.fullmatch(finding.remedy)) is not None]
    _, matched = _pattern(list(dict.fromkeys(str(json.loads(mod[2])) for mod in found)), modules)
    return f"mods: [{{use: {found[0][1]}, match: {matched}}}]"


def show_drift(drifts: Sequence[SiteDrift]) -> None:
    """Print operands by drift relative to their threshold, largest first: MANY of them and all beyond it."""
    ranked = sorted(drifts, key=lambda drift: drift.distance / drift.threshold, reverse=True)
    shown = [drift for place, drift in enumerate(ranked) if drift.exceeded or place < MANY]
    print_table(
        ("site", "operand", "octaves", "limit", "", "what changed most"),
        [
            (
                drift.site,
                drift.operand.value,
                f"{drift.distance:.2f}",
                f"{drift.threshold:.2f}",
                "drifted" if drift.exceeded else "within",
                drift.words,
            )
            for drift in shown
        ],
        numbers=("octaves", "limit"),
    )
    if len(shown) < len(ranked):
        print_line(f"{len(ranked) - len(shown)} more moved less.")


def result(examined: Examined, learned: Learned, places: Places, full: bool) -> dict[str, object]:
    """The JSON of a probe: estimates of the policy's recipes, and findings."""
    profile = learned.recorded.profile
    return {
        "name": profile.name,
        "profile": str(places.summary),
        "full": str(places.full) if full else None,
        "steps": profile.steps,
        "every": profile.every,
        "samples": profile.samples,
        "batch_size": profile.batch_size,
        "seconds": learned.seconds,
        "sites": [
            {
                "site": site.name,
                "m": site.rows.at(profile.batch_size),
                "k": site.k,
                "n": site.n,
                "watched": profile.site(site.name) is not None,
                "gemms": _gemm_results(ProbeRow(site, settings, profile.site(site.name))),
            }
            for site, settings in zip(examined.sites, examined.settings, strict=True)
        ],
        "findings": profile.findings,
    }


def drift_result(known: Profile, drifts: Sequence[SiteDrift]) -> dict[str, object]:
    """The JSON of a comparison."""
    return {
        "name": known.name,
        "created": known.created,
        "drifted": any(drift.exceeded for drift in drifts),
        "operands": drifts,
    }


def _groups(examined: Examined, profile: Profile) -> list[list[ProbeRow]]:
    groups: dict[object, list[ProbeRow]] = {}
    known = {site.name: site for site in profile.sites}
    for site, settings in zip(examined.sites, examined.settings, strict=True):
        wanted = tuple((each.compute, each.operands) for each in settings.gemms.values())
        there = known.get(site.name)
        key = (pattern_of(site.name), site.rows, site.k, site.n, site.calls, site.input_grad, wanted, there is None)
        groups.setdefault(key, []).append(ProbeRow(site, settings, there))
    return list(groups.values())


def _gemms(site: Site) -> list[Gemm]:
    return [gemm for gemm in Gemm if gemm is not Gemm.DGRAD or site.input_grad]


def _gemm_lines(rows: Sequence[ProbeRow]) -> list[tuple[str, ...]]:
    first = rows[0]
    if first.profile is None:
        return [("", "not watched", *_BLANK, "")]
    wanted = [gemm for gemm in _gemms(first.site) if first.settings.gemms[gemm].compute is not Compute.KEEP]
    if not wanted:
        return [("", "kept", *_BLANK, "")]
    return [_gemm_line(gemm, rows) for gemm in wanted]


def _without_ne(cells: tuple[str, ...]) -> tuple[str, ...]:
    return cells[:_NE] + cells[_NE + 1 :]


_BLANK = ("", "", "", "", "")


def _gemm_line(gemm: Gemm, rows: Sequence[ProbeRow]) -> tuple[str, ...]:
    recipe = _recipe_words(gemm, rows[0].settings.gemms[gemm].operands)
    judged = [(estimate, row) for row in rows if (estimate := _estimate(row, gemm)) is not None]
    if not judged:
        return (gemm.value, recipe, *_BLANK, "no estimate")
    worst, row = min(
        judged, key=lambda each: (_WORST_FIRST.index(each[0].verdict(each[1].settings.budget)), -each[0].mere.mean)
    )
    mere, sqnr = worst.mere, worst.sqnr_db
    verdict = worst.verdict(row.settings.budget).value
    changes = [ne.ne_percent for row in rows if (ne := _ne(row, gemm)) is not None]
    most = format_ne(max(changes, key=lambda change: change.high)) if changes else ""
    return (gemm.value, recipe, f"{mere.mean:.3f}", _ends(mere, 3), f"{sqnr.mean:.1f}", _ends(sqnr, 1), most, verdict)


def _estimate(row: ProbeRow, gemm: Gemm) -> Estimate | None:
    return None if row.profile is None else estimate_of(row.profile, gemm, row.settings.gemms[gemm].operands)


def _ne(row: ProbeRow, gemm: Gemm) -> NeEstimate | None:
    """The change of NE by the recipe of `_estimate`."""
    estimate = _estimate(row, gemm)
    return None if row.profile is None or estimate is None else row.profile.ne_estimate(gemm, estimate.operands)


def _ends(interval: Interval, digits: int) -> str:
    return f"{interval.low:.{digits}f} to {interval.high:.{digits}f}"


def _recipe_words(gemm: Gemm, operands: OperandPair) -> str:
    """Label of a recipe without maxima of static scales, which may differ among the sites of a line."""
    first, second = operands
    return recipe_label(gemm, (replace(first, amax=None), replace(second, amax=None)))


def _gemm_results(row: ProbeRow) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for gemm in _gemms(row.site):
        wanted = row.settings.gemms[gemm]
        estimate = _estimate(row, gemm)
        results.append(
            {
                "gemm": gemm,
                "compute": wanted.compute,
                "operands": wanted.operands,
                "mere": None if estimate is None else estimate.mere,
                "sqnr_db": None if estimate is None else estimate.sqnr_db,
                "draws": None if estimate is None else estimate.draws,
                "ne": _ne(row, gemm),
                "verdict": None if estimate is None else estimate.verdict(row.settings.budget),
            }
        )
    return results


def _pattern(sites: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """A label for sites that are alike, and a policy's `match` for exactly them: a glob or all names, as JSON."""
    if len(sites) == 1:
        return sites[0], json.dumps(sites[0])
    pattern = common_pattern(sites)
    compiled = compile_pattern(pattern)
    if {name for name in names if compiled.fullmatch(name)} == set(sites):
        return pattern, json.dumps(pattern)
    return pattern, json.dumps(list(sites))
