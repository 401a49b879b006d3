"""The judgement of a seed as a line of a report, and the table of many."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_models.generator import CORE, ODD, RandomModel, draw
from benchmarks.random_models.judge import FAILURES, Verdict, Workplace


def start_process() -> None:
    """Prepare a process that judges: one thread, no plans that other processes have kept."""
    torch.set_num_threads(1)
    os.environ["LOKA_CACHE"] = "off"


def judge_seed(seed: int, out: Path | None = None) -> dict[str, Any]:
    """Judge the model of a seed in a folder of its own; returns its line of the report.

    A failing model is reduced to the steps that it needs, and its sources are kept in `out`.
    """
    model = draw(seed)
    with tempfile.TemporaryDirectory(prefix="loka-random-") as folder, Workplace(Path(folder)) as workplace:
        judged = workplace.judge(model)
        row: dict[str, Any] = {
            "seed": seed,
            "verdict": judged.verdict.value,
            "reason": judged.reason,
            "steps": list(map(str, model.steps)),
            "inputs": model.inputs,
            "outputs": model.outputs,
            "modules": judged.modules,
            "seconds": round(judged.seconds, 2),
        }
        if judged.verdict in FAILURES:
            small = reduced(workplace, model, judged.verdict)
            row["reduced"] = [str(step) for step in small.steps if (step.kind, step.name) != CORE]
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                for each, suffix in ((model, ""), (small, "_reduced")):
                    (out / f"{seed}{suffix}.py").write_text(each.source(), encoding="utf-8")
    return row


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Verdicts of models that have each odd kind, then the failures by what is left of a reduced model."""
    rows = list(rows)
    verdicts = [verdict.value for verdict in Verdict]
    counts = {kind: Counter[str]() for kind in ("all", *ODD)}
    for row in rows:
        for kind in {"all", *(step.partition(":")[0] for step in row["steps"])} & counts.keys():
            counts[kind][row["verdict"]] += 1
    lines = [" ".join([f"{'models with':<12}", *(f"{each:>10}" for each in verdicts)])]
    lines += [" ".join([f"{kind:<12}", *(f"{count[each]:>10}" for each in verdicts)]) for kind, count in counts.items()]
    failures: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if "reduced" in row:
            failures.setdefault((row["verdict"], "; ".join(row["reduced"]) or row["inputs"]), []).append(row["seed"])
    lines += [
        f"{verdict}: {what}: seeds {', '.join(map(str, seeds))}" for (verdict, what), seeds in sorted(failures.items())
    ]
    return "\n".join(lines)


def reduced(workplace: Workplace, model: RandomModel, verdict: Verdict) -> RandomModel:
    """The model with every step taken away without which it keeps its verdict, and plain inputs where these do."""
    plain = replace(model, inputs="two", outputs="tensor")
    if plain != model and workplace.judge(plain).verdict is verdict:
        model = plain
    for step in model.steps:
        smaller = model.without(step)
        if smaller.steps and workplace.judge(smaller).verdict is verdict:
            model = smaller
    return model
