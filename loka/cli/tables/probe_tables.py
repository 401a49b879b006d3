"""Tables of `loka probe`: a line per GEMM for sites that are alike, and one entry for findings that are alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.cli.output import print_line, print_table
from loka.numerics.enums import Compute, Gemm
from loka.plan.format import common_pattern, format_ne, grouped, pattern_of
from loka.policy.checks import compile_pattern
from loka.probe.estimate import recipe_label
from loka.probe.profile.profile import Estimate, Finding, Interval, NeEstimate, Profile, SiteProfile, Verdict

if TYPE_CHECKING:
    from loka.cli.probe_run import Learned
    from loka.cli.profile_paths import Places
    from loka.graph.sites.site import Site
    from loka.plan.examine import Examined
    from loka.policy.settings import SiteSettings
    from loka.probe.drift import SiteDrift

COLUMNS = ("site", "count", "M", "K", "N", "GEMM", "recipe", "MERE", "95 %", "SQNR, dB", "95 % ", "NE", "verdict")
_NE = COLUMNS.index("NE")
NUMBERS = ("count", "M", "K", "N", "MERE", "SQNR, dB")
_BLANK = ("",) * 5
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

    @property
    def gemms(self) -> list[Gemm]:
        """The GEMMs that the site has in training."""
        return list(self.site.gemms)

    @property
    def kind(self) -> tuple[object, ...]:
        """What sites that share a line have in common."""
        site, wanted = self.site, tuple((each.compute, each.operands) for each in self.settings.gemms.values())
        sizes = (site.rows, site.k, site.n, site.calls, site.gemms)
        return (pattern_of(site.name), *sizes, wanted, self.profile is None)

    def estimate(self, gemm: Gemm) -> Estimate | None:
        """The estimate of the policy's recipe."""
        return None if self.profile is None else self.profile.estimate(gemm, self.settings.gemms[gemm].operands)

    def ne(self, gemm: Gemm) -> NeEstimate | None:
        """The change of NE by the recipe of the estimate."""
        estimate = self.estimate(gemm)
        return None if self.profile is None or estimate is None else self.profile.ne_estimate(gemm, estimate.operands)


def probe_rows(examined: Examined, profile: Profile) -> list[ProbeRow]:
    """A row for each site, in model order."""
    known = {site.name: site for site in profile.sites}
    return [
        ProbeRow(site, settings, known.get(site.name))
        for site, settings in zip(examined.sites, examined.settings, strict=True)
    ]


def show_sites(examined: Examined, profile: Profile) -> None:
    """Print MERE and SQNR of each GEMM that is not kept, in its recipe; a line shows the worst of its sites."""
    groups = grouped(probe_rows(examined, profile), lambda row: row.kind)
    lines = []
    for rows in groups:
        site = rows[0].site
        m = str(site.rows.at(profile.batch_size)) + (f" x{site.calls}" if site.calls != 1 else "")
        name = common_pattern([row.site.name for row in rows])
        head: tuple[str, ...] = (name, str(len(rows)), m, str(site.k), str(site.n))
        for cells in _gemm_lines(rows):
            lines.append((*head, *cells))
            head = ("",) * len(head)
    shown = [place for place in range(len(COLUMNS)) if place != _NE or any(line[_NE] for line in lines)]
    print_table([COLUMNS[place] for place in shown], [[line[place] for place in shown] for line in lines], NUMBERS)
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

    def key(finding: Finding) -> tuple[str, ...]:
        mod = _MOD.fullmatch(finding.remedy)
        remedy = finding.remedy.replace(finding.site, "") if mod is None else pattern_of(str(json.loads(mod[2])))
        return finding.kind, pattern_of(finding.site), _NUMBER.sub("#", finding.evidence), remedy

    return grouped(findings, key)


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
                "site": row.site.name,
                "m": row.site.rows.at(profile.batch_size),
                "k": row.site.k,
                "n": row.site.n,
                "watched": row.profile is not None,
                "gemms": [_gemm_result(row, gemm) for gemm in row.gemms],
            }
            for row in probe_rows(examined, profile)
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


def _gemm_lines(rows: Sequence[ProbeRow]) -> list[tuple[str, ...]]:
    first = rows[0]
    if first.profile is None:
        return [("", "not watched", *_BLANK, "")]
    wanted = [gemm for gemm in first.gemms if first.settings.gemms[gemm].compute is not Compute.KEEP]
    return [_gemm_line(gemm, rows) for gemm in wanted] or [("", "kept", *_BLANK, "")]


def _gemm_line(gemm: Gemm, rows: Sequence[ProbeRow]) -> tuple[str, ...]:
    one, other = rows[0].settings.gemms[gemm].operands  # maxima of static scales may differ among the sites of a line
    recipe = recipe_label(gemm, (one.without_amax, other.without_amax))
    judged = [
        (_WORST_FIRST.index(estimate.verdict(row.settings.budget)), -estimate.mere.mean, estimate)
        for row in rows
        if (estimate := row.estimate(gemm)) is not None
    ]
    if not judged:
        return (gemm.value, recipe, *_BLANK, "no estimate")
    verdict, _, worst = min(judged, key=lambda each: each[:2])
    mere, sqnr = worst.mere, worst.sqnr_db
    changes = [ne.ne_percent for row in rows if (ne := row.ne(gemm)) is not None]
    most = format_ne(max(changes, key=lambda change: change.high)) if changes else ""
    figures = (f"{mere.mean:.3f}", _ends(mere, 3), f"{sqnr.mean:.1f}", _ends(sqnr, 1), most)
    return (gemm.value, recipe, *figures, _WORST_FIRST[verdict].value)


def _ends(interval: Interval, digits: int) -> str:
    return f"{interval.low:.{digits}f} to {interval.high:.{digits}f}"


def _gemm_result(row: ProbeRow, gemm: Gemm) -> dict[str, object]:
    wanted, estimate = row.settings.gemms[gemm], row.estimate(gemm)
    return {
        "gemm": gemm,
        "compute": wanted.compute,
        "operands": wanted.operands,
        "mere": None if estimate is None else estimate.mere,
        "sqnr_db": None if estimate is None else estimate.sqnr_db,
        "draws": None if estimate is None else estimate.draws,
        "ne": row.ne(gemm),
        "verdict": None if estimate is None else estimate.verdict(row.settings.budget),
    }


def _pattern(sites: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """A label for sites that are alike, and a policy's `match` for exactly them: a glob or all names, as JSON."""
    if len(sites) == 1:
        return sites[0], json.dumps(sites[0])
    pattern = common_pattern(sites)
    compiled = compile_pattern(pattern)
    if {name for name in names if compiled.fullmatch(name)} == set(sites):
        return pattern, json.dumps(pattern)
    return pattern, json.dumps(list(sites))
