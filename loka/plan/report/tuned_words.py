"""What a plan says of the measured step that confirms it."""

from __future__ import annotations

from loka.plan.plan import TunedStep


def describe_tuned(tuned: TunedStep) -> str:
    """`confirmed by a measured step: 3.21 ms against 4.10 ms of compiled BF16 on NVIDIA H200, 2026-11-23`.

    A winner that is no faster than BF16 says so.
    """
    where = f"on {tuned.device}, {tuned.date[:10]}"
    bf16 = f"{tuned.bf16_ms:.3g} ms of {_LAUNCHED[tuned.execution]} BF16"
    if tuned.is_native:
        return f"a measured step found nothing clearly faster than {bf16} {where}{_fp8(tuned)}"
    if tuned.step_ms >= tuned.bf16_ms:
        return f"slower in a measured step: {tuned.step_ms:.3g} ms against {bf16} {where}"
    return f"confirmed by a measured step: {tuned.step_ms:.3g} ms against {bf16} {where}"


def _fp8(tuned: TunedStep) -> str:
    """`; FP8 took 8.04 ms at best: 1.03x, with a noise of 4.0 %`."""
    if tuned.best_fp8_ms is None:
        return ""
    gain = tuned.bf16_ms / tuned.best_fp8_ms
    noise = f": {gain:.2f}x, with a noise of {100 * (tuned.best_fp8_noise or 0.0):.1f} %" if gain > 1 else ""
    return f"; FP8 took {tuned.best_fp8_ms:.3g} ms at best{noise}"


_LAUNCHED = {"eager": "eager", "compiled": "compiled", "graph": "captured"}
