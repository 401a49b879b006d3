"""Time of a whole plan: the sum over sites and interactions, and what a step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.devices.targets import spec_of
from loka.kernels.measurements.parts import TimeSource
from loka.plan.format import EXTRAPOLATED_NOTE, format_share, format_speedup
from loka.plan.plan import Plan, StepTime
from loka.plan.select.interaction_times import step_times
from loka.plan.select.workload import surroundings_of

FEW = 0.05  # share of a total that may be extrapolated without a mark
_NOTHING = 0.005  # a change of speed that is none
_REPLAYED = 'under torch.compile(mode="reduce-overhead") (execution: {mode: reduce-overhead}), or '


@dataclass(frozen=True, slots=True)
class Total:
    """Sum of the times of all sites that measurements decided, and of interactions, in one training step."""

    us: float
    without_fp8_us: float  # the same with every GEMM in the model's dtype: what fusing alone takes
    as_is_us: float  # of the native model by torch.compile
    sites: tuple[tuple[TimeSource, int], ...]  # number of sites whose times are measured, interpolated, estimated
    interactions: tuple[tuple[TimeSource, int], ...] = ()  # the same for interactions
    left_out: int = 0  # interactions not included, as torch.compile's time for them is unknown
    host_us: float | None = None  # of the host, for the launches of all sites; None where it was not considered
    without_fp8_host_us: float | None = None
    as_is_host_us: float | None = None
    extrapolated: float = 0.0  # the largest share that is beyond measured sizes, of the three times

    @property
    def speedup(self) -> float:
        """Speedup relative to the native model."""
        return self.as_is_us / self.us

    @property
    def by_fusing(self) -> float:
        """Speedup relative to the native model with every GEMM in the model's dtype."""
        return self.as_is_us / self.without_fp8_us

    @property
    def by_fp8(self) -> float:
        """Speedup by FP8 itself: relative to the same with every GEMM in the model's dtype."""
        return self.without_fp8_us / self.us


def total_time(plan: Plan) -> Total | None:
    """The sum over sites and interactions; None where no measurement decided any site, or none is called."""
    timed = [(site.timing, site.site.calls) for site in plan.sites if site.timing is not None and site.site.calls]
    if not timed:
        return None
    fused = [(chosen, as_is, each.calls) for each, chosen, as_is in step_times(plan.interactions)]
    ours = [(chosen, calls) for chosen, _, calls in fused]
    planned = [*((timing.chosen, calls) for timing, calls in timed), *ours]
    without_fp8 = [*((timing.without_fp8, calls) for timing, calls in timed), *ours]
    as_is = [*((timing.as_is, calls) for timing, calls in timed), *((as_is, calls) for _, as_is, calls in fused)]
    return Total(
        us=_sum_us(planned),
        without_fp8_us=_sum_us(without_fp8),
        as_is_us=_sum_us(as_is),
        sites=_counted([timing.chosen.source for timing, _ in timed]),
        interactions=_counted([chosen.source for chosen, _, _ in fused]),
        left_out=len(plan.interactions) - len(fused),
        host_us=_host_us([(timing.chosen, calls) for timing, calls in timed]),
        without_fp8_host_us=_host_us([(timing.without_fp8, calls) for timing, calls in timed]),
        as_is_host_us=_host_us([(timing.as_is, calls) for timing, calls in timed]),
        extrapolated=max(map(_extrapolated, (planned, without_fp8, as_is))),
    )


def _sum_us(times: Sequence[tuple[StepTime, int]]) -> float:
    return round(sum(time.us * calls for time, calls in times), 3)


def _extrapolated(times: Sequence[tuple[StepTime, int]]) -> float:
    """Share of a sum in times of which some part is beyond the measured sizes."""
    beyond = [(time, calls) for time, calls in times if time.extrapolated]
    return round(_sum_us(beyond) / _sum_us(times), 4)


def comparable(plan: Plan, other: Plan) -> bool:
    """True if times of the same sites, of what is around them, and of interactions are known of both plans."""
    left_out = [len(each.interactions) - len(list(step_times(each.interactions))) for each in (plan, other)]
    return _untimed(plan) == _untimed(other) and left_out[0] == left_out[1] and _around_counts(plan, other)


def _around_counts(plan: Plan, merged: Plan) -> bool:
    """False if what is behind a site is in no time of the plan that has merged the site with others.

    So it is where siblings go on differently (the gate of a SwiGLU). Their gradients are then made as one matrix, too:
    on an H200 BF16 lost 6 % of a step, of which 9 % were said to be saved.
    """
    after = {site.site.name: surroundings_of(site.site).after for site in plan.sites}
    return all(
        after.get(name, "") == surroundings_of(site.site).after for site in merged.sites for name in site.site.members
    )


def _untimed(plan: Plan) -> frozenset[str]:
    return frozenset(site.site.name for site in plan.sites if site.timing is None and site.site.calls)


def _host_us(times: Sequence[tuple[StepTime, int]]) -> float | None:
    known = [time.host_us * calls for time, calls in times if time.host_us is not None]
    return round(sum(known), 3) if known else None


def _counted(sources: Sequence[TimeSource]) -> tuple[tuple[TimeSource, int], ...]:
    return tuple((source, sources.count(source)) for source in TimeSource if source in sources)


def format_by_fp8(gain: float) -> str:
    """What FP8 itself does to a time, by the ratio without it and with it: `FP8 itself gains 1.26x`."""
    if abs(gain - 1) < _NOTHING:
        return "FP8 itself changes nothing"
    return f"FP8 itself {'gains' if gain > 1 else 'makes it slower,'} {format_speedup(gain)}"


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What a whole step takes on the host and on the GPU, in microseconds, planned, without FP8 and native."""

    host_us: float
    without_fp8_host_us: float
    as_is_host_us: float
    gpu_us: float
    without_fp8_gpu_us: float
    as_is_gpu_us: float

    @property
    def waits_for_host(self) -> bool:
        """True if the host takes longer than the GPU."""
        return self.host_us > self.gpu_us

    @property
    def speedup(self) -> float:
        """Speedup of a step in a loop: each model waits for the slower of the two."""
        return max(self.as_is_host_us, self.as_is_gpu_us) / max(self.host_us, self.gpu_us)

    @property
    def by_fp8(self) -> float:
        """Speedup of such a step by FP8 itself."""
        return max(self.without_fp8_host_us, self.without_fp8_gpu_us) / max(self.host_us, self.gpu_us)


def predicted_step(plan: Plan, total: Total) -> StepPrediction | None:
    """The prediction for a whole step; None unless the policy says how the model runs.

    Nor is there one where CUDA graphs are replayed and the policy says nothing of the rest of a step.
    """
    execution = plan.execution
    hosts = (total.host_us, total.without_fp8_host_us, total.as_is_host_us)
    if execution is None or hosts[0] is None or hosts[1] is None or hosts[2] is None:
        return None
    host, gpu = 1e3 * execution.host_ms, 1e3 * execution.gpu_ms
    if execution.mode.replays and not host and not gpu:
        return None
    return StepPrediction(
        *(host + us for us in (hosts[0], hosts[1], hosts[2])),
        *(gpu + us for us in (total.us, total.without_fp8_us, total.as_is_us)),
    )


def format_host(plan: Plan, total: Total) -> str:
    """What a step waits for, where the policy says how the model runs, else "".

    `the step waits for the host, 0.82x over BF16 (compiled, as on the host of an NVIDIA H200); under ...`
    """
    step = predicted_step(plan, total)
    if step is None or plan.execution is None:
        return ""
    mode, measured_on = plan.execution.mode, spec_of(plan.target).host.measured_on
    over = f"{format_speedup(step.speedup)} over BF16"
    if not step.waits_for_host:
        return f"the step waits for the GPU, {over} ({mode.value})"
    return (
        f"the step waits for the host, {over} ({mode.value}, as on {measured_on}); "
        f"{'' if mode.replays else _REPLAYED}with a larger batch it would wait for the GPU"
    )


def format_summed(total: Total) -> str:
    """Contents of a total: `GEMMs with their norms and interactions`."""
    what = "GEMMs with their norms"
    if total.interactions:
        what += " and interactions"
    if total.left_out:
        left = f"{total.left_out} interaction{'s' if total.left_out > 1 else ''}"
        what += f" (without {left}, never measured by torch.compile)"
    return what


def format_time_sources(total: Total) -> str:
    """Sources of the times: `sites: 11 measured, 5 estimated; interactions: 8 measured`, and what `~` marks, if any."""
    words = []
    for name, counts in (("sites", total.sites), ("interactions", total.interactions)):
        if counts:
            words.append(f"{name}: {', '.join(f'{count} {source.value}' for source, count in counts)}")
    if total.extrapolated:
        words.append(f"{EXTRAPOLATED_NOTE}, {format_share(total.extrapolated)} of the time")
    return "; ".join(words)
