"""Long runs in BF16 and FP8: `python -m benchmarks.long_runs [MODEL ...] -o FILE`, for a GPU.

Each model trains with and without the mods that make another model, calm and with spikes of the learning rate, outlier
batches and a NaN, in BF16 and in FP8 from the same weights on the same batches. FILE keeps each finished run: the same
command goes on after a stop.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from torch import nn

from benchmarks.long_runs.long_models import MODELS, LongModel
from benchmarks.long_runs.long_run import SCENARIOS, Curve, CurveFile, Patch, RunKey, run
from benchmarks.study import run_study, tell
from loka.bench.packages import Workshop
from loka.mods.adapt import adapt
from loka.plan.planner import make_plan

PRECISIONS = ("bf16", "fp8")


def study(options: argparse.Namespace) -> str:
    """Run what the file lacks, as far as the time goes; returns the report of all that it has."""
    file, deadline = CurveFile(Path(options.output)), time.monotonic() + options.seconds
    for name in options.models:
        for mods in (False, True):
            with Workshop() as workshop:
                patches = _patches(workshop, MODELS[name], mods, options.batch)
                for scenario in options.scenarios:
                    for seed in range(options.first_seed, options.first_seed + options.seeds):
                        for precision in PRECISIONS:
                            key = RunKey(
                                name, mods, precision, scenario, seed, options.steps, options.batch, options.points,
                                options.test_rows,
                            )  # fmt: skip
                            if file.has(key) or time.monotonic() > deadline:
                                continue
                            file.add(run(MODELS[name], key, patches[precision], options.device, options.compile, tell))
    return report(file.curves)


def _patches(workshop: Workshop, model: LongModel, mods: bool, batch: int) -> dict[str, Patch]:
    """What makes the model of each precision."""
    name = f"long_{model.name}{'_mods' if mods else ''}"
    plan = make_plan(workshop.write(f"{name}.yaml", model.policy(mods, batch)))
    package = workshop.package(plan)
    native: Patch = partial(adapt, adaptations=plan.adaptations)

    def fp8(model: nn.Module) -> object:
        return package.apply(model)

    return {"bf16": native, "fp8": fp8}


def report(curves: Sequence[Curve]) -> str:
    """A table of the NE at the end: mean over the seeds in each precision, and the paired change with its error."""
    by_case: dict[tuple[str, bool, str, int], dict[str, dict[int, Curve]]] = {}
    for curve in curves:
        key = curve.key
        case = by_case.setdefault((key.model, key.mods, key.scenario, key.steps), {each: {} for each in PRECISIONS})
        case[key.precision][key.seed] = curve
    lines = [
        "| model | mods | scenario | steps | seeds | NE in BF16 | in FP8 | change, % | steps left out, BF16; FP8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, mods, scenario, steps), runs in by_case.items():
        seeds = sorted(runs["bf16"].keys() & runs["fp8"].keys())
        if not seeds:
            continue
        native, fp8 = ([runs[precision][seed] for seed in seeds] for precision in PRECISIONS)
        changes = [100 * (b.ne[-1] / a.ne[-1] - 1) for a, b in zip(native, fp8, strict=True)]
        error = f" +- {stdev(changes) / len(changes) ** 0.5:.4f}" if len(changes) > 1 else ""
        left_out = "; ".join(", ".join(str(step) for step in each[0].left_out) or "none" for each in (native, fp8))
        lines.append(
            f"| {model} | {'yes' if mods else 'no'} | {scenario} | {steps} | {len(seeds)} | "
            f"{fmean(run.ne[-1] for run in native):.5f} | {fmean(run.ne[-1] for run in fp8):.5f} | "
            f"{fmean(changes):+.4f}{error} | {left_out} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description="Long runs in BF16 and FP8.")
    parser.add_argument("models", nargs="*", default=["wukong", "dcnv2"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("-o", "--output", required=True, help="file of finished runs")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--points", type=int, default=20, help="evaluations of a run")
    parser.add_argument("--test-rows", type=int, default=16 * 4096)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return run_study(lambda: study(options))


if __name__ == "__main__":
    sys.exit(main())
