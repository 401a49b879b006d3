"""Gathers the values of a page from a plan, its profile, and the runs and measurements that were kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loka.bench.report.distributions import Distributions, distributions
from loka.bench.report.error_dots import DotChart, Judged, dot_chart, judged
from loka.bench.report.loss_curves import KeptRuns
from loka.bench.report.markdown_page import decisions, evidence, finding_rows, shortfalls
from loka.bench.report.measured_steps import MeasuredSteps
from loka.bench.report.model_tree import TreeNode, model_tree
from loka.bench.report.precision import LABELS, MEANINGS, Precision, fused_sites, precision_of
from loka.bench.report.provenance import Source, sources
from loka.bench.report.site_times import TimeChart, time_chart
from loka.bench.results import Table
from loka.devices.targets import DEVICES, TargetDevice
from loka.plan.format import format_share, format_speedup
from loka.plan.mod_words import describe_changes, describe_gain_in, describe_unchanged
from loka.plan.ne import planned_ne
from loka.plan.plan import Plan
from loka.plan.planner import Planned
from loka.plan.report.plan_rows import group_sites
from loka.plan.totals import Total, format_host, format_time_sources, format_total, predicted_step, total_time

ROWS = 300  # of a table; `loka plan` has the others
OPEN_NODES = 60  # a tree of more nodes starts with closed branches


class Tone(StrEnum):
    """What a figure says, for its colour; the text says it too."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure at the top of the page."""

    label: str
    value: str
    note: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class PrecisionKey:
    """An entry of the legend."""

    precision: Precision
    label: str
    meaning: str
    share: str  # of the training GEMM FLOPs


@dataclass(frozen=True, slots=True)
class ModCard:
    """One mod of the policy."""

    use: str
    place: str
    exact: bool
    changes: str
    gain: str  # "" where it is not known
    unchanged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a page shows. Text is as it was found: the page escapes it."""

    name: str
    policy: str  # as the user named it
    model: str  # its factory where the profile names it, else ""
    target: str
    batch_size: int
    version: str  # of LoKA
    headlines: tuple[Headline, ...]
    keys: tuple[PrecisionKey, ...]
    tree: tuple[TreeNode, ...]
    opened: bool  # the tree's branches
    times: TimeChart | None
    times_total: tuple[str, ...]  # sentences below the bars
    steps: MeasuredSteps | None
    errors: DotChart | None
    evidence: Table | None
    distributions: Distributions | None
    runs: KeptRuns
    mods: tuple[ModCard, ...]
    findings: Table | None
    shortfalls: tuple[str, ...]
    decisions: Table
    rows_left_out: int  # of the tables of decisions and of evidence
    sources: tuple[Source, ...]


def gather(planned: Planned, policy: str, runs: KeptRuns, steps: MeasuredSteps | None = None) -> Report:
    """The values of a policy's page; `policy` is the user's name for it. Deterministic for its arguments."""
    plan, known = planned.plan, planned.known
    rows, total, tree, errors = group_sites(plan, alike=True), total_time(plan), model_tree(plan), dot_chart(plan)
    return Report(
        name=plan.name,
        policy=policy,
        model=known.profile.model if known is not None else "",
        target=plan.target.value,
        batch_size=plan.batch_size,
        version=plan.loka_version,
        headlines=_headlines(planned, total, steps),
        keys=_keys(plan),
        tree=tree,
        opened=_nodes(tree) <= OPEN_NODES,
        times=time_chart(plan),
        times_total=_total_words(plan, total),
        steps=steps,
        errors=errors,
        evidence=evidence(rows[:ROWS]) if errors is not None else None,
        distributions=distributions(plan, known) if known is not None else None,
        runs=runs,
        mods=tuple(
            ModCard(
                use=mod.use,
                place=mod.place,
                exact=mod.exact,
                changes=describe_changes(mod),
                gain=describe_gain_in(plan, mod),
                unchanged=tuple(describe_unchanged(mod.unchanged)),
            )
            for mod in plan.mods
        ),
        findings=finding_rows(known.profile.findings) if known is not None and known.profile.findings else None,
        shortfalls=tuple(shortfalls(plan, rows)),
        decisions=decisions(rows[:ROWS]),
        rows_left_out=max(len(rows) - ROWS, 0),
        sources=sources(planned, runs.charts, steps),
    )


def _headlines(planned: Planned, total: Total | None, steps: MeasuredSteps | None) -> tuple[Headline, ...]:
    plan = planned.plan
    fp8 = sum(site.fp8 for site in plan.sites)
    found = [
        Headline("training GEMM FLOPs in FP8", format_share(plan.share_fp8), f"{fp8} of {len(plan.sites)} sites"),
        _speed(plan, total, steps),
        _errors(judged(plan)),
    ]
    ne = planned_ne(plan.sites)
    if ne is not None:
        over = plan.ne_budget is not None and ne.ne_percent.high > plan.ne_budget
        note = f"predicted over {ne.known} GEMMs, 95 % interval {ne.ne_percent.low:+.3g} to {ne.ne_percent.high:+.3g} %"
        if plan.ne_budget is not None:
            note += f"; budget {plan.ne_budget:g} %"
        found.append(Headline("change of NE", f"{ne.ne_percent.mean:+.3g} %", note, Tone.BAD if over else Tone.PLAIN))
    found.append(_device(planned))
    return tuple(found)


def _speed(plan: Plan, total: Total | None, steps: MeasuredSteps | None) -> Headline:
    """A measured step in a plain loop if there is one, else the prediction, with the host's share if it is known."""
    measured = [bar for bar in steps.bars if bar.variant == "loka-fp8" and bar.speedup] if steps is not None else []
    if steps is not None and measured and measured[0].speedup is not None:
        bar, speedup = measured[0], measured[0].speedup
        note = f"a step takes {bar.figure} ms ({bar.launch}, batch size {steps.batch_size}), on one {steps.device}"
        return Headline("measured speed-up over BF16", format_speedup(speedup), note, _tone(speedup))
    if total is None:
        return Headline("predicted speed-up", "not known", "no measurements for this target")
    step = predicted_step(plan, total)
    if step is not None and plan.execution is not None:
        waits = "host" if step.waits_for_host else "GPU"
        note = f"a whole step, {plan.execution.mode.value}: it waits for the {waits}"
        return Headline("predicted speed-up in a loop", format_speedup(step.speedup), note, _tone(step.speedup))
    note = "of the GEMMs and what is fused with them, on the GPU; launches and the rest of a step are not counted"
    return Headline("predicted speed-up over BF16", format_speedup(total.speedup), note, _tone(total.speedup))


def _tone(speedup: float) -> Tone:
    return Tone.GOOD if speedup > 1 else Tone.BAD if speedup < 1 else Tone.PLAIN


def _errors(found: Judged) -> Headline:
    label = "GEMMs in FP8 within their budget"
    if found.total == 0:
        return Headline(label, "none", "nothing runs in FP8")
    if found.without == found.total:
        return Headline(label, "no evidence", "no profile says what FP8 costs here: run loka probe", Tone.BAD)
    counts = ((found.undecided, "undecided"), (found.unsafe, "over budget"), (found.without, "without evidence"))
    note = ", ".join(f"{count} {word}" for count, word in counts if count) or "MERE and SQNR, each with its interval"
    return Headline(label, f"{found.safe} of {found.total}", note, Tone.GOOD if found.safe == found.total else Tone.BAD)


def _device(planned: Planned) -> Headline:
    target = planned.plan.target
    if target is TargetDevice.REFERENCE:
        return Headline("target", "reference", "slow but exact: no device is named")
    machine = planned.measurements.machine.device if planned.measurements is not None else ""
    note = f"times of one {machine}" if machine else f"{DEVICES[target].architecture}; no measurements"
    return Headline("target", target.value.upper(), note)


def _keys(plan: Plan) -> tuple[PrecisionKey, ...]:
    """The precisions that the model has, with their shares of the training GEMM FLOPs."""
    fused, shares = fused_sites(plan), dict[Precision, float]()
    for site in plan.sites:
        for gemm in site.gemms:
            precision = precision_of(gemm, site.site.name in fused)
            shares[precision] = shares.get(precision, 0.0) + site.site.share
    total = sum(shares.values()) or 1.0
    return tuple(
        PrecisionKey(each, LABELS[each], MEANINGS[each], format_share(shares[each] / total))
        for each in Precision
        if each in shares
    )


def _nodes(tree: Sequence[TreeNode]) -> int:
    return sum(1 + _nodes(node.children) for node in tree)


def _total_words(plan: Plan, total: Total | None) -> tuple[str, ...]:
    if total is None:
        return ()
    sentences = (f"{format_total(total)} ({format_time_sources(total)}).", format_host(plan, total))
    return tuple(f"{each[:1].upper()}{each[1:]}" for each in sentences if each)
