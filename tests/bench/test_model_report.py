"""Tables, Markdown and JSON of whole steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from loka.bench.device import KernelSum
from loka.bench.machine import Environment
from loka.bench.model.model_report import (
    MeasuredModel,
    ModelReport,
    StepOutcome,
    VariantFigures,
    chapters,
    heading,
    notes,
    to_markdown,
    to_plain,
    write_files,
)
from loka.bench.model.model_variants import StepBlock, chosen_blocks
from loka.bench.timing import RoundTiming

HERE = Environment("a device", "0.1.0", "3.12.0", "2.11.0", "13.0", "3.6.0", None, "1.6.0")
BLOCKS = chosen_blocks("train", None)
LOOP, GRAPHS, CAPTURED = BLOCKS


def figures(step_ms: float, ratio: float | None = 1.0) -> VariantFigures:
    rounds = tuple(RoundTiming(each * step_ms, each) for each in (1.0, 0.5, 2.0))
    beside = () if ratio is None else tuple(RoundTiming(ratio * each.step_ms, 1.0) for each in rounds)
    return VariantFigures(rounds, beside, 1234.4, KernelSum(57, 7.5))


def outcome(block: StepBlock, variant: str, found: VariantFigures | None, failure: str = "") -> StepOutcome:
    return StepOutcome(block, variant, found, failure)


MODEL = MeasuredModel(
    "ranker", "shop:build", 4096, ("no_bias",), "a synthetic loss, adam",
    (
        outcome(CAPTURED, "bf16", figures(8.0)),
        outcome(CAPTURED, "loka-fp8", None, "CaptureError: it | waits"),
        outcome(LOOP, "loka-fp8", figures(5.0, 2.0)),
        outcome(LOOP, "bf16", figures(10.0)),
        outcome(LOOP, "bf16-eager", replace(figures(20.0, None), kernels=None, peak_mib=None)),
    ),
)  # fmt: skip
REPORT = ModelReport(
    "loka bench model shop.yaml",
    "2026-11-23T04:05Z",
    HERE,
    BLOCKS,
    ("bf16-eager", "bf16", "tf32", "loka-fp8"),
    (MODEL,),
)


def test_ratios_are_of_the_same_round() -> None:
    base = (RoundTiming(10.0, 1.0), RoundTiming(30.0, 1.0), RoundTiming(10.0, 1.0))
    own = (RoundTiming(5.0, 1.0), RoundTiming(15.0, 1.0), RoundTiming(1.0, 1.0))
    made = replace(figures(1.0), rounds=own, beside=base)
    assert (made.speedups, made.ratio) == ((2.0, 2.0, 10.0), 2.0)
    assert replace(made, beside=base[:1]).ratio == 2.0
    assert replace(made, beside=()).ratio is None


def test_times_stand_side_by_side_without_a_graph_first() -> None:
    model, chapter = chapters(REPORT)
    times, _, failed = chapter.tables
    assert (model.title, model.text) == ("ranker", heading(MODEL))
    assert chapter.title == "one training step, autocast to bfloat16, float32 parameters"
    assert times == (
        ("variant", "loop", "reduce-overhead", "captured"),
        [
            ("bf16-eager", "20.00", "-", "-"),
            ("bf16", "10.00", "-", "8.00"),
            ("loka-fp8", "5.00 (2.00)", "-", "failed"),
        ],
    )
    assert failed == (("launch", "variant", "why"), [("captured", "loka-fp8", "CaptureError: it | waits")])


def test_every_figure_has_a_line_and_the_loop_comes_first() -> None:
    _, chapter = chapters(REPORT)
    columns, rows = chapter.tables[1]
    assert columns[:6] == ("launch", "variant", "step ms", "ratio", "GPU ms", "host ms")
    assert rows[0] == ("loop", "bf16-eager", "20.00", "-", "-", "1.00", "-", "-", "204800", "3")
    assert rows[2] == ("loop", "loka-fp8", "5.00", "2.000", "7.50", "1.00", "57", "1234", "819200", "3")
    assert [(row[0], row[1]) for row in rows[3:]] == [("captured", "bf16")]


def test_the_page_says_what_was_measured_and_what_was_not() -> None:
    page = to_markdown(REPORT)
    assert heading(MODEL) in page
    assert "shop:build at batch size 4096; loka- variants have the mods no_bias; a training step has" in page
    assert "| loka-fp8 | 5.00 (2.00) | - | failed |" in page
    assert "CaptureError: it \\| waits" in page
    assert notes(REPORT)[-1] == "Not measured: ranker: train autocast reduce-overhead."
    failed = replace(REPORT, models=(MeasuredModel("a", "b:c", 8, (), failure="no module"),))
    assert "Nothing was measured: no module" in to_markdown(failed)
    assert "Not measured" not in to_markdown(failed)


def test_files_hold_every_round(tmp_path: Path) -> None:
    data, page = write_files(REPORT, tmp_path)
    assert data.name == "model-2026-11-23T0405.json"
    assert page.read_text() == to_markdown(REPORT)
    plain = json.loads(data.read_text())
    assert plain == to_plain(REPORT)
    lines = {(line["launch"], line["variant"]): line for line in plain["models"][0]["lines"]}
    line = lines["loop", "loka-fp8"]
    assert (line["step_ms"], line["gpu_ms"], line["launches"]) == (5.0, 7.5, 57)
    assert line["rounds"][2] == {"step_ms": 10.0, "host_ms": 2.0}
    assert lines["captured", "loka-fp8"]["failure"] == "CaptureError: it | waits"
    assert "step_ms" not in lines["captured", "loka-fp8"]
