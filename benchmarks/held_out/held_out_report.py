"""The comparison of samplers as Markdown: conditions, the target, tables, and the largest gaps."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.held_out.held_out_cases import StudySizes
from benchmarks.held_out.held_out_rows import (
    COPULA,
    GAUSSIAN,
    NORMAL,
    POOLED_ROWS,
    TARGET_DB,
    TARGET_MERE_PERCENT,
    TARGET_RATIO,
    TRAINING_ROWS,
    WHOLE_RUN,
    Gaps,
    HeldOutRow,
    JudgedRow,
    gaps,
    grouped,
    misses,
)

ORDER = (NORMAL, GAUSSIAN, COPULA, GAUSSIAN + WHOLE_RUN, COPULA + WHOLE_RUN, POOLED_ROWS, TRAINING_ROWS)
WORST = 12


def markdown(command: str, judged: Sequence[JudgedRow], sizes: StudySizes) -> str:
    """All tables of the result."""
    rows = [row for one in judged for row in one.rows]
    parts = [
        "# Samplers against held-out real batches",
        _conditions(command, judged, sizes),
        "## The target",
        _target(rows),
        "## All sites, GEMMs and recipes",
        _gap_table(rows, "", lambda row: ""),
        "## By model and data",
        _gap_table(rows, "model, data", lambda row: f"{row.model}, {row.data}"),
        "## By recipe and GEMM",
        _gap_table(rows, "recipe, GEMM", lambda row: f"{row.recipe}, {row.gemm.value}"),
        "## Where the Gaussian is outside its interval",
        _outside_text(),
        _miss_table(rows),
        f"## The {WORST} largest median gaps of ours",
        _worst(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(command: str, judged: Sequence[JudgedRow], sizes: StudySizes) -> str:
    lines = [
        f"Command: `{command}` (`make judge-samplers` runs it for all models). "
        f"{datetime.now(UTC):%Y-%m-%d}; {_processor()}, one thread; Python {platform.python_version()}, "
        f"torch {torch.__version__}. Seed {sizes.seed}: the same command gives the same numbers.",
        "",
        f"Each model trained as below; Probe watched the last {sizes.watched} steps, every {sizes.every}nd of them, "
        f"512 rows a call at most. Then the weights were frozen, and {sizes.batches} batches of rows that were never "
        "trained on (shuffled, of the training batch size) went forward and backward. *Actual* is the mean over those "
        "batches of each GEMM's MERE (floor 1e-3 of the RMS) and SQNR, both operands quantized alike, against float64 "
        f"on the same operands; *predicted* is the mean over {sizes.draws} draws. Intervals are 95 %, normal. "
        "The gap is predicted minus actual: dB of SQNR, percent of the actual MERE.",
        "",
        "Two rows are no samplers, but tell what limits them. `training rows`: the actual error on as many batches of "
        "training rows under the same frozen weights. Its gap is what differs between training and held-out rows, plus "
        "the scatter of so few batches; nothing that learns from training rows can be expected below it. "
        f"`pooled rows`: operands put together, {sizes.pooled} times, from single real rows of the watched part of "
        "training (input and output gradient of the same row together), with the real weights. Its gap is what is lost "
        "once rows are taken for independent of each other and of the step that they come from; a sampler that draws "
        "rows one by one from one profile can be expected to miss it too.",
        "",
        "| model | data | batch | steps | learning rate | sites | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in judged:
        case, sites = one.case, len({row.site for row in one.rows})
        lines.append(
            f"| {case.model} | {case.data} | {case.batch_size} | {case.steps} | {case.learning_rate:g} | {sites} "
            f"| {sum(one.seconds.values()):.0f} |"
        )
    exact = sorted(
        {(row.model, row.data, row.site, row.gemm.value, row.recipe) for row in rows_of(judged) if row.exact}
    )
    if exact:
        lines += [
            "",
            f"Left out of every figure: {len(exact)} combinations of site, GEMM and recipe whose actual SQNR is above "
            "90 dB (one feature, scaled rowwise, is exact): "
            + ", ".join(f"{len(group)} x {name}" for name, group in _by_gemm(exact).items())
            + ".",
        ]
    return "\n".join(lines)


def rows_of(judged: Iterable[JudgedRow]) -> list[HeldOutRow]:
    """All rows of all cases."""
    return [row for one in judged for row in one.rows]


def _target(rows: Sequence[HeldOutRow]) -> str:
    """Table of each part of the target, for all GEMMs together and for each: measured value, and whether it is met."""
    lines = [
        f"Medians over sites and recipes of |gap|, at most {TARGET_DB} dB in SQNR, {TARGET_MERE_PERCENT:g} % in MERE; "
        "and where the actual value is outside the Gaussian's interval, of our |gap| over the Gaussian's, at most "
        f"{TARGET_RATIO:g}. In brackets: the Gaussian's own gap, and in how many of those places ours is at most half.",
        "",
        "| GEMM | SQNR gap, dB | met | MERE gap, % | met | ratio in SQNR | met | ratio in MERE | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for gemm, group in _by_gemm_and_all(rows).items():
        ours, paper = (gaps(row for row in group if row.sampler == name) for name in (COPULA, GAUSSIAN))
        cells = [gemm, f"{ours.db_median:.2f} ({paper.db_median:.2f})", _yes(ours.db_median <= TARGET_DB)]
        cells += [f"{ours.mere_median:.1f} ({paper.mere_median:.1f})", _yes(ours.mere_median <= TARGET_MERE_PERCENT)]
        for metric in ("SQNR", "MERE"):
            found = misses(group, COPULA, metric)
            cells += [
                f"{found.ratio_median:.2f} ({_percent(found.halved)} of {found.outside})",
                _yes(found.ratio_median <= TARGET_RATIO),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gap_table(rows: Sequence[HeldOutRow], label: str, key: Callable[[HeldOutRow], str]) -> str:
    head = [label] if label else []
    lines = [
        "| "
        + " | ".join([*head, "sampler", "rows", "dB median", "dB p90", "MERE % median", "MERE % p90", "bias dB"])
        + " |",
        "|" + "---|" * (len(head) + 7),
    ]
    for name, group in grouped(rows, key).items():
        for sampler in ORDER:
            own = [row for row in group if row.sampler == sampler]
            if not own:
                continue
            found = gaps(own)
            cells = [*([name] if label else []), sampler, str(found.count)]
            cells += [f"{found.db_median:.2f}", f"{found.db_p90:.2f}"]
            cells += [f"{found.mere_median:.1f}", f"{found.mere_p90:.1f}", f"{found.db_bias:+.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _outside_text() -> str:
    return (
        "*Outside*: the actual mean lies outside the Gaussian's own interval. *Ratio*: |gap| of the other sampler over "
        "|gap| of the Gaussian, there. *Resolved*: those of them where the actual's interval, over the held-out "
        "batches, does not touch the Gaussian's either, so that the Gaussian is wrong beyond the batches' scatter."
    )


def _miss_table(rows: Sequence[HeldOutRow]) -> str:
    lines = [
        "| metric | GEMM | sampler | rows | outside | median ratio | at most half | resolved | ratio | at most half |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for metric in ("SQNR", "MERE"):
        for gemm, group in _by_gemm_and_all(rows).items():
            for sampler in (COPULA, POOLED_ROWS, TRAINING_ROWS):
                found = misses(group, sampler, metric)
                lines.append(
                    f"| {metric} | {gemm} | {sampler} | {found.count} | {_percent(found.share)} "
                    f"| {found.ratio_median:.2f} | {_percent(found.halved)} | {found.resolved} "
                    f"| {found.resolved_ratio_median:.2f} | {_percent(found.resolved_halved)} |"
                )
    return "\n".join(lines)


def _by_gemm_and_all(rows: Sequence[HeldOutRow]) -> dict[str, list[HeldOutRow]]:
    return {"all": list(rows)} | {gemm.value: group for gemm, group in grouped(rows, lambda row: row.gemm).items()}


def _worst(rows: Sequence[HeldOutRow]) -> str:
    """Sites and GEMMs with the largest median |gap| of the copula in SQNR over the recipes."""
    shown = (COPULA, GAUSSIAN, POOLED_ROWS, TRAINING_ROWS)
    found: list[tuple[tuple[str, str, str, str], list[Gaps]]] = []
    for key, group in grouped(rows, lambda row: (row.model, row.data, row.site, row.gemm.value)).items():
        each = [gaps(row for row in group if row.sampler == name) for name in shown]
        if each[0].count:
            found.append((key, each))
    found.sort(key=lambda entry: -entry[1][0].db_median)
    lines = [
        "| model | data | site | GEMM | ours, dB (bias) | Gaussian | pooled rows | training rows |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, each in found[:WORST]:
        cells = [f"{one.db_median:.2f} ({one.db_bias:+.2f})" for one in each]
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(lines)


def _by_gemm(exact: Iterable[tuple[str, ...]]) -> dict[str, list[tuple[str, ...]]]:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for entry in exact:
        groups.setdefault(f"{entry[3]} {entry[4]} of `{entry[2]}`", []).append(entry)
    return groups


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


def _processor() -> str:
    """The processor's name from /proc/cpuinfo, elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
    return platform.machine()
