"""How each figure of a page came about: measured on which device, modelled, or probed from how many batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.bench.report.loss_curves import RunChart
from loka.bench.report.measured_steps import MeasuredSteps
from loka.devices.targets import DEVICES
from loka.plan.format import describe_tuned
from loka.plan.planner import Planned
from loka.plan.totals import format_time_sources, total_time


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
    found += _times(planned)
    if plan.tuned is not None:
        how = f"{describe_tuned(plan.tuned)}, in {plan.tuned.file} (sha256 {plan.tuned.sha256[:12]})"
        found.append(Source("which candidate plan was taken", Origin.MEASURED, how))
    if steps is not None:
        how = (
            f"{steps.command}, {steps.date}, on one {steps.device} with torch {steps.torch}; {steps.file} names the "
            "model and not its plan"
        )
        found.append(Source("whole training steps", Origin.MEASURED, how))
    found += _evidence(planned)
    for run in runs:
        pairs, seeds = _counted(run.pairs, "pair"), _counted(run.seeds, "seed")
        how = f"{pairs} of runs over {seeds} on {run.device}, kept in {run.file}"
        found.append(Source(f"loss and NE of loka {run.verb}", Origin.TRAINED, how))
    return tuple(found)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _times(planned: Planned) -> list[Source]:
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
        "between measured sizes; estimated: from bytes and FLOPs beyond them"
    )
    found = [
        Source("times of kernels", Origin.MEASURED, kernels),
        Source("time and speed-up of the model", Origin.MODELLED, "the sum of its kernels' times, not a measured step"),
    ]
    if plan.execution is not None:
        host = DEVICES[plan.target].host.measured_on
        how = f"launches counted, at the cost of one on {host}, for a model that runs {plan.execution.mode.value}"
        found.append(Source("time of the host", Origin.MODELLED, f"{how}; the rest of a step as the policy says"))
    if any(mod.gain is not None for mod in plan.mods):
        how = "the model planned again without it, by the same times"
        found.append(Source("gain of each mod", Origin.MODELLED, how))
    return found


def _evidence(planned: Planned) -> list[Source]:
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
