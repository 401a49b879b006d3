"""What a plan comes to: the verdict in one sentence, and a step's times without LoKA, without FP8 and with it."""

from __future__ import annotations

from loka.devices.targets import spec_of
from loka.mods.registry import ModKind, names_of
from loka.plan.format import EXTRAPOLATED, describe_tuned, format_figure, format_share, format_speedup
from loka.plan.plan import Plan
from loka.plan.prospect import LEAST_GAIN
from loka.plan.totals import (
    FEW,
    Total,
    format_by_fp8,
    format_host,
    format_summed,
    format_time_sources,
    predicted_step,
    total_time,
)

# Six of eleven public models with 0.2 to 0.6 ms of GEMMs took steps of 2 ms on an H200, of the host's time.
SHORT_US = 1000.0
_SHORT = "A step this short may wait for its host, and then nothing gains: loka bench model measures whole steps."
_STEP = ("a training step", "compiled BF16", "LoKA without FP8", "LoKA with FP8")


def verdict(plan: Plan) -> str:
    """One sentence: what is gained over compiled BF16, how much of it by FP8, and how much of the model is in FP8."""
    where = f"{plan.name} for {plan.target} at batch size {plan.batch_size}"
    count, total = sum(site.fp8 for site in plan.sites), total_time(plan)
    own = _before_joining(plan)
    fp8 = f"{count} of {len(plan.called)} sites{own} in FP8, {format_share(plan.share_fp8)} of the training GEMM FLOPs"
    if count == 0:
        fp8 = f"nothing in FP8, of {len(plan.called)} site{'s' if len(plan.called) != 1 else ''}{own}"
    slowed = sum(site.slowed_by_fp8 for site in plan.sites)
    if slowed:
        them = f"FP8 slows {slowed} of them" if count > 1 else "FP8 slows it"
        fp8 += f"; {them}, which compute: auto would leave in BF16"
    if plan.tuned is not None:
        return f"{where}: {describe_tuned(plan.tuned)} ({plan.tuned.file}: {plan.tuned.choice}); {fp8}"
    if total is None:
        unknown = measurements_note(plan)
        if plan.measurements is not None:
            unknown = f"{plan.measurements[0]} has no times for what may run here: none decided"
        return f"{where}: {fp8}{'; ' if unknown else ''}{unknown}"
    step = predicted_step(plan, total)
    speedup, by_fp8 = (step.speedup, step.by_fp8) if step is not None else (total.speedup, total.by_fp8)
    gain = f"{format_speedup(speedup)} over compiled BF16 is predicted"
    if step is None:
        gain += f" for {format_summed(total)}"
    if count:
        gain += f", of which fusing gains {format_speedup(speedup / by_fp8)} and {format_by_fp8(by_fp8)}"
    gain += _by_mods(plan, total, "them" if count else "it")
    return f"{where}: {gain}; {fp8}"


def _before_joining(plan: Plan) -> str:
    """How many sites the model itself has where mods join some: ` (14 before merge_siblings)`; "" where none do."""
    joined = {
        mod.use: sum(len(each.sites) - 1 for each in mod.rewritten)
        for mod in plan.mods
        if mod.use in names_of(ModKind.SITES)
    }
    names = [use for use, fewer in joined.items() if fewer]
    return f" ({len(plan.called) + sum(joined.values())} before {' and '.join(names)})" if names else ""


def _by_mods(plan: Plan, total: Total, beside: str) -> str:
    """What mods that keep the function gain beside the speed-up, which is over the model with them: `; merge_siblings
    gains 1.17x beside them`. "" where they gain less than a hundredth.
    """
    fused = names_of(ModKind.INTERACTIONS)  # whose gain is in the speed-up
    gained: dict[str, float] = {}
    for mod in plan.mods:
        if mod.exact and mod.use not in fused and mod.gain is not None and mod.gain.us > 0:
            gained[mod.use] = gained.get(mod.use, 0.0) + mod.gain.us
    speedup = 1 + sum(gained.values()) / total.us
    if speedup < 1 + LEAST_GAIN:
        return ""
    return f"; {' and '.join(gained)} gain{'' if len(gained) > 1 else 's'} {format_speedup(speedup)} beside {beside}"


def step_table(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]] | None:
    """The columns and rows of a step's times: the GPU's, the host's where it is predicted, the speed-up over BF16.

    A plan without FP8 has no last column. None without times.
    """
    total = total_time(plan)
    if plan.measurements is None or total is None:
        return None
    mark = EXTRAPOLATED if total.extrapolated > FEW else ""
    gpu, host, step = (total.as_is_us, total.without_fp8_us, total.us), None, predicted_step(plan, total)
    if step is not None:
        gpu = (step.as_is_gpu_us, step.without_fp8_gpu_us, step.gpu_us)
        host = (step.as_is_host_us, step.without_fp8_host_us, step.host_us)
    waits = [max(pair) for pair in zip(gpu, host or gpu, strict=True)]
    rows = [("us of the GPU", *(mark + format_figure(us) for us in gpu))]
    rows += [("us of the host", *map(format_figure, host))] if host is not None else []
    rows.append(("speed-up", *(format_speedup(waits[0] / us) for us in waits)))
    shown = len(_STEP) if plan.share_fp8 > 0 else len(_STEP) - 1
    return _STEP[:shown], [row[:shown] for row in rows]


def step_sentences(plan: Plan) -> tuple[str, ...]:
    """What a step's times are of and by, and what the step waits for; () without times."""
    total = total_time(plan)
    if plan.measurements is None or total is None:
        return ()
    found = f"Predicted for {format_summed(total)} by {plan.measurements[0]} ({format_time_sources(total)})."
    fused = names_of(ModKind.INTERACTIONS)  # whose gain is in the columns
    mods = dict.fromkeys(mod.use for mod in plan.mods if (mod.adaptations or mod.rewritten) and mod.use not in fused)
    if mods:
        found += f" All columns are of the model with {', '.join(mods)}."
    host = format_host(plan, total)
    if host:
        return found, f"{host[:1].upper()}{host[1:]}."
    return (found, _SHORT) if total.as_is_us < SHORT_US and predicted_step(plan, total) is None else (found,)


def measurements_note(plan: Plan) -> str:
    """That there are no measurements for the plan's target, with what to do; "" if there are, or none are needed."""
    device = spec_of(plan.target)
    reference = device.is_reference
    priced = plan.execution is not None and not plan.execution.mode.replays
    if plan.measurements is not None or (reference and not priced):
        return ""
    start = f"execution: {plan.execution.mode.value}: " if plan.execution is not None and priced else ""
    decided = "neither time nor the host decided anything" if start else "time decided nothing"
    advice = "" if reference else "; record them on that device: loka bench kernels --record FILE"
    if device.lacks_measurements and plan.share_fp8:
        advice += f", and name the file in `measurements:`; FP8 was never run on {device.title} by us"
    return f"{start}no measurements for {plan.target} ship or are named, so {decided}{advice}"
