"""The page of `loka report` as HTML: one file, without a script and without anything from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loka.bench.markdown import Table
from loka.bench.report.geometry import label, percent
from loka.bench.report.loss_curves import KeptRuns, RunChart
from loka.bench.report.measured_steps import MeasuredSteps
from loka.bench.report.model_tree import (
    LABELS,
    MEANINGS,
    Precision,
    TreeNode,
    model_tree,
    precision_of,
    precision_shares,
    recipe_of,
)
from loka.bench.report.site_charts import Distributions, DotChart, TimeChart, distributions, dot_chart, time_chart
from loka.bench.report.tables import decisions, evidence, finding_rows, shortfalls
from loka.devices.targets import spec_of
from loka.plan.format import describe_tuned, format_figure, format_share, format_speedup
from loka.plan.mod_words import describe_changes, describe_gain, describe_unchanged
from loka.plan.ne import planned_ne
from loka.plan.plan import ModPlan, Plan
from loka.plan.planner import Planned
from loka.plan.totals import format_time_sources, predicted_step, total_time
from loka.plan.view.table import group_sites, name_of_group, rule_names, site_groups
from loka.plan.view.verdict import step_sentences, step_table, verdict
from loka.policy.problems import printable
from loka.probe.profile.profile import Verdict
from loka.templating.templates import render_page

ROWS = 300  # of a table; `loka plan` has the others
OPEN_NODES = 60  # a tree of more nodes starts with closed branches
GENERATOR = "LoKA report"  # in the head of every page, by which it is known
_NAMED = 4  # sites, or groups of them, in a headline
_HEAD = 1024  # bytes that the generator stands within


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


class Origin(StrEnum):
    """How a figure was come by."""

    COUNTED = "counted"
    MEASURED = "measured"
    MODELLED = "modelled"
    PROBED = "probed"
    TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures of one kind are from."""

    what: str
    origin: Origin
    how: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a page shows. Text is as it was found: the page escapes it."""

    plan: Plan
    policy: str  # as the user named it
    model: str  # its factory where the profile names it, else ""
    verdict: str
    headlines: tuple[Headline, ...]
    shares: dict[Precision, float]  # of the training GEMM FLOPs
    tree: tuple[TreeNode, ...]
    opened: bool  # the tree's branches
    times: TimeChart | None
    step: Table | None  # its times without LoKA, without FP8 and with it
    step_sentences: tuple[str, ...]  # below
    steps: MeasuredSteps | None
    errors: DotChart | None
    evidence: Table | None
    distributions: Distributions | None
    runs: KeptRuns
    mods: tuple[tuple[ModPlan, str, str, list[str]], ...]  # with changes, gain ("": not known), and what it left
    findings: Table | None
    shortfalls: tuple[str, ...]
    decisions: Table
    rows_left_out: int  # of the tables of decisions and of evidence
    sources: tuple[Source, ...]


def gather(planned: Planned, policy: str, runs: KeptRuns, steps: MeasuredSteps | None = None) -> Report:
    """The values of a policy's page; `policy` is the user's name for it. Deterministic for its arguments."""
    plan, known = planned.plan, planned.known
    rows = group_sites(plan, True)
    tree, errors = model_tree(plan), dot_chart(plan)
    return Report(
        plan=plan,
        policy=policy,
        model=known.profile.model if known is not None else "",
        verdict=verdict(plan),
        headlines=_headlines(planned, steps),
        shares=precision_shares(plan),
        tree=tree,
        opened=_nodes(tree) <= OPEN_NODES,
        times=time_chart(plan),
        step=step_table(plan),
        step_sentences=step_sentences(plan),
        steps=steps,
        errors=errors,
        evidence=evidence(rows[:ROWS]) if errors is not None else None,
        distributions=distributions(plan, known) if known is not None else None,
        runs=runs,
        mods=tuple(
            (mod, describe_changes(mod), describe_gain(plan, mod), describe_unchanged(mod.unchanged))
            for mod in plan.mods
        ),
        findings=finding_rows(known.profile.findings) if known is not None and known.profile.findings else None,
        shortfalls=tuple(shortfalls(plan, rows)),
        decisions=decisions(rows[:ROWS]),
        rows_left_out=max(len(rows) - ROWS, 0),
        sources=sources(planned, runs.charts, steps),
    )


def to_html(report: Report) -> str:
    """The page of a report. Deterministic for its argument."""
    values = {
        "report": report,
        "plan": report.plan,
        "generator": GENERATOR,
        "precision_labels": LABELS,
        "precision_meanings": MEANINGS,
        "precision_of": precision_of,
        "recipe_of": recipe_of,
        "figure": format_figure,
        "share": format_share,
        "speedup": format_speedup,
        "tick": label,
        "percent": percent,
    }
    return render_page("page.html.j2", values, printable)


def is_html_report(head: bytes) -> bool:
    """True for the start of a page that `to_html` made."""
    return f'<meta name="generator" content="{GENERATOR}">'.encode() in head[:_HEAD]


def _nodes(tree: Sequence[TreeNode]) -> int:
    return sum(1 + _nodes(node.children) for node in tree)


def _headlines(planned: Planned, steps: MeasuredSteps | None) -> tuple[Headline, ...]:
    plan = planned.plan
    fp8 = sum(site.fp8 for site in plan.sites)
    found = [
        Headline("training GEMM FLOPs in FP8", format_share(plan.share_fp8), f"{fp8} of {len(plan.called)} sites"),
        _speed(plan, steps),
        *_by_fp8(plan),
        _errors(plan),
    ]
    ne = planned_ne(plan.sites)
    if ne is not None:
        over = plan.ne_budget is not None and ne.ne_percent.high > plan.ne_budget
        note = f"predicted over {ne.known} GEMMs, 95 % interval {ne.ne_percent.low:+.3g} to {ne.ne_percent.high:+.3g} %"
        if plan.ne_budget is not None:
            note += f"; budget {plan.ne_budget:g} %"
        note += ne.note
        found.append(Headline("change of NE", f"{ne.ne_percent.mean:+.3g} %", note, Tone.BAD if over else Tone.PLAIN))
    return (*found, _device(planned))


def _speed(plan: Plan, steps: MeasuredSteps | None) -> Headline:
    """A measured step in a plain loop if there is one, else the prediction, with the host's share if it is known."""
    if steps is not None:
        for step in steps.steps:
            if step.variant == "loka-fp8" and step.ratio:
                how = f"{step.launch}, batch size {steps.batch_size}"
                note = f"a step takes {step.figure} ms ({how}), on one {steps.device}"
                return _faster("measured speed-up over BF16", step.ratio, note)
    total = total_time(plan)
    if total is None:
        return Headline("predicted speed-up", "not known", "no measurements for this target")
    predicted = predicted_step(plan, total)
    if predicted is not None and plan.execution is not None:
        waits = "host" if predicted.waits_for_host else "GPU"
        note = f"a whole step, {plan.execution.mode.value}: it waits for the {waits}"
        return _faster("predicted speed-up in a loop", predicted.speedup, note)
    note = "of the GEMMs and what is fused with them, on the GPU; launches and the rest of a step are not counted"
    return _faster("predicted speed-up over BF16", total.speedup, note)


def _by_fp8(plan: Plan) -> tuple[Headline, ...]:
    """What FP8 itself gains, and the sites that it slows."""
    total = total_time(plan)
    if total is None or plan.share_fp8 == 0:
        return ()
    predicted = predicted_step(plan, total)
    by_fp8 = total.by_fp8 if predicted is None else predicted.by_fp8
    fused = format_speedup(total.by_fusing if predicted is None else predicted.speedup / by_fp8)
    return (_faster("of which FP8 itself", by_fp8, f"predicted; without FP8, LoKA is {fused}"), *_slowed(plan))


def _slowed(plan: Plan) -> tuple[Headline, ...]:
    """The sites that are slower in FP8, by name; nothing where there are none."""
    groups = [group for group in site_groups(plan) if group[0].slowed_by_fp8]
    if not groups:
        return ()
    names = ", ".join(name_of_group(each, rule_names(plan)) for each in groups[:_NAMED])
    more = f" and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
    count = sum(map(len, groups))
    return (Headline("sites that FP8 slows", str(count), f"predicted: {names}{more}", Tone.BAD),)


def _faster(text: str, speedup: float, note: str) -> Headline:
    tone = Tone.GOOD if speedup > 1 else Tone.BAD if speedup < 1 else Tone.PLAIN
    return Headline(text, format_speedup(speedup), note, tone)


def _errors(plan: Plan) -> Headline:
    """The verdicts on all GEMMs in FP8."""
    title = "GEMMs in FP8 within their budget"
    fp8 = [gemm.evidence for site in plan.sites for gemm in site.gemms if gemm.fp8]
    found = Counter(each.verdict if each is not None else None for each in fp8)
    if not fp8:
        return Headline(title, "none", "nothing runs in FP8")
    if found[None] == len(fp8):
        return Headline(title, "no evidence", "no profile says what FP8 costs here: run loka probe", Tone.BAD)
    words = ((Verdict.UNDECIDED, "undecided"), (Verdict.UNSAFE, "over budget"), (None, "without evidence"))
    note = ", ".join(f"{found[each]} {word}" for each, word in words if found[each])
    note += " in the profile (loka probe)" if found[None] else ""
    good, note = not note, note or "MERE and SQNR, each with its interval"
    return Headline(title, f"{found[Verdict.SAFE]} of {len(fp8)}", note, Tone.GOOD if good else Tone.BAD)


def _device(planned: Planned) -> Headline:
    target = planned.plan.target
    device = spec_of(target)
    if device.is_reference:
        return Headline("target", device.title, "slow but exact: no device is named")
    machine = planned.measurements.machine.device if planned.measurements is not None else ""
    note = f"times of one {machine}" if machine else f"{device.architecture}; no measurements"
    return Headline("target", device.title, note)


def sources(planned: Planned, runs: tuple[RunChart, ...], steps: MeasuredSteps | None) -> tuple[Source, ...]:
    """The sources of a page's figures, in the page's order."""
    plan = planned.plan
    files = ", ".join(f"{file} (sha256 {digest[:12]})" for file, digest in plan.policy_files)
    found = [
        Source(
            "precision, kernel and share of the FLOPs",
            Origin.COUNTED,
            f"planned by LoKA {plan.loka_version} from {files}: one forward of the model on fake tensors, every GEMM "
            f"counted at batch size {plan.batch_size}",
        )
    ]
    found += _sources_of_times(planned)
    if plan.tuned is not None:
        how = f"{describe_tuned(plan.tuned)}, in {plan.tuned.file} (sha256 {plan.tuned.sha256[:12]})"
        found.append(Source("which candidate plan was taken", Origin.MEASURED, how))
    if steps is not None:
        how = (
            f"{steps.command}, {steps.date}, on one {steps.device} with torch {steps.torch}; {steps.file} names the "
            "model and not its plan"
        )
        found.append(Source("whole training steps", Origin.MEASURED, how))
    found += _sources_of_evidence(planned)
    for run in runs:
        pairs, seeds = _counted(run.pairs, "pair"), _counted(run.seeds, "seed")
        how = f"{pairs} of runs over {seeds} on {run.device}, kept in {run.file}"
        found.append(Source(f"loss and NE of loka {run.verb}", Origin.TRAINED, how))
    return tuple(found)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _sources_of_times(planned: Planned) -> list[Source]:
    plan, total = planned.plan, total_time(planned.plan)
    if plan.measurements is None or total is None:
        return []
    name, digest = plan.measurements
    machine = ""
    if (known := planned.measurements) is not None:
        on, date = known.machine, f", {known.date[:10]}" if known.date else ""
        machine = f"on one {on.device} with torch {on.torch}, CUDA {on.cuda}, Triton {on.triton}{date}, "
    kernels = (
        f"{machine}each kernel alone, in {name} (sha256 {digest[:12]}); {format_time_sources(total)}. Interpolated: "
        "between measured sizes; extrapolated: beyond them; estimated: from bytes, for want of the kernel"
    )
    found = [
        Source("times of kernels", Origin.MEASURED, kernels),
        Source("time and speed-up of the model", Origin.MODELLED, "the sum of its kernels' times, not a measured step"),
    ]
    if plan.execution is not None:
        host = spec_of(plan.target).host.measured_on
        how = f"launches counted, at the cost of one on {host}, for a model that runs {plan.execution.mode.value}"
        found.append(Source("time of the host", Origin.MODELLED, f"{how}; the rest of a step as the policy says"))
    if any(mod.gain is not None for mod in plan.mods):
        how = "the model planned again without it, by the same times"
        found.append(Source("gain of each mod", Origin.MODELLED, how))
    return found


def _sources_of_evidence(planned: Planned) -> list[Source]:
    known = planned.known
    if known is None:
        return []
    profile = known.profile
    seen = (
        f"{profile.samples} sampled batches of {profile.batch_size} in {profile.steps} training steps, "
        f"{profile.created[:10]}, by LoKA {profile.loka_version}, in {known.name} (sha256 {known.sha256[:12]})"
    )
    draws = sorted({gemm.evidence.draws for site in planned.plan.sites for gemm in site.gemms if gemm.evidence})
    count = "" if not draws else f"{draws[0]} to {draws[-1]} " if len(draws) > 1 else f"{draws[0]} "
    found = [
        Source("distributions and findings", Origin.PROBED, seen),
        Source(
            "MERE and SQNR",
            Origin.PROBED,
            f"predicted from {count}pairs of operands drawn after these distributions, with 95 % intervals",
        ),
    ]
    if any(gemm.evidence and gemm.evidence.ne_percent for site in planned.plan.sites for gemm in site.gemms):
        how = "the probed model run with each GEMM quantized, on the probed batches, with 95 % intervals"
        found.append(Source("change of NE by a GEMM", Origin.PROBED, how))
    return found
