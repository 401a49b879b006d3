"""Recording, exporting, mapping and comparing from the command line, on a file of made-up measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from loka.bench import __main__ as entry
from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span
from loka.bench.record.commands import Command, carry_out
from loka.bench.record.gemm_parts import PreparedCall
from loka.bench.record.grid import grid
from loka.bench.record.record import record
from loka.bench.record.run_record import parts_of
from loka.bench.record.store import FileBook
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements, Recording, Versions
from loka.kernels.measurements.parts import Part, PartKind, TimeSource

MACHINE = Versions("NVIDIA H100 80GB HBM3", "9.0", "580.65.06", "13.0", "13.1.1", "2.11.0", "3.6.0", "")


class FakeBench:
    """Each part takes a microsecond for each million of elements, and one more."""

    def prepare(self, part: Part) -> tuple[PreparedCall, ...]:
        size = part.rows * part.columns * max(part.contraction, 1)
        share = 0.5 if part.recipe else 1.0
        errors = (0.17, 28.5) if part.work is PartKind.GEMM else (None, None)
        return (PreparedCall(lambda: 1.0 + share * size / 1e6, (), lambda found: Check(*errors)),)


class FakeClock:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def time(self, call, arguments) -> Span:  # type: ignore[no-untyped-def]
        return Span(self.factor * call(), 0.01, 9)


def fill(path: Path, parts: list[Part], factor: float = 1.0) -> list[str]:
    lines: list[str] = []
    with Recording(path, lambda kernel: MACHINE) as recording:
        record(parts, FileBook(recording), FakeBench(), FakeClock(factor), lines.append)
    return lines


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    parts = [part for part in grid(("gemm", "quantise", "turn")) if max(part.rows, part.columns) <= 512]
    fill(tmp_path / "h100.sqlite", [part for part in parts if part.contraction <= 512])
    return tmp_path / "h100.sqlite"


def test_what_was_recorded_can_be_planned_by_and_is_not_measured_again(recorded: Path) -> None:
    part = Part(PartKind.GEMM, "torch.scaled_mm", 512, 256, 128, recipe="e4m3 rowwise, e4m3 rowwise, fast")
    known = Measurements.open(recorded, "h100")
    timed = known.time(part)
    assert timed is not None
    assert timed.source is TimeSource.MEASURED
    assert timed.us == pytest.approx(1.0 + 512 * 256 * 128 / 2e6, rel=1e-5)
    assert known.error(part) == (0.17, 28.5)
    assert fill(recorded, [part]) == []


def test_the_map_is_written_as_a_page(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(
        "loka.bench.record.commands.plot", lambda found, machine, path: drawn.append((machine, path.name))
    )
    outcome = carry_out(Command("crossover", (str(recorded),), out=tmp_path / "results"), print)
    (page,) = (tmp_path / "results").glob("crossover-*.md")
    assert drawn == [(MACHINE.device, page.name.replace(".md", ".svg"))]
    assert "GEMM alone, precise accumulation: 64 shapes: FP8 wins 64, loses 0, ties 0" in outcome.text
    assert len(outcome.plain["GEMM"]) == 64  # type: ignore[arg-type]
    assert "driver 580.65.06" in page.read_text()
    assert str(tmp_path) not in page.read_text()


def test_measurements_are_exported_without_a_gpu(recorded: Path, tmp_path: Path) -> None:
    text = tmp_path / "h100.jsonl"
    outcome = carry_out(Command("kernels", (str(recorded),), export=text), print)
    assert "measurements on NVIDIA H100 80GB HBM3" in outcome.text
    assert '"loka bench kernels --record h100.sqlite"' in text.read_text().splitlines()[0]
    assert Measurements.open(text, "h100").sha256 == Measurements.open(recorded, "h100").sha256


def test_two_recordings_are_compared(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "again.sqlite"
    fill(again, list(Measurements.open(recorded, "h100").parts), factor=1.1)
    assert entry.main(["regret", str(recorded), str(again)]) == 0
    printed = capsys.readouterr().out
    assert "0.00 %" in printed
    assert "10.00 %, 10.00 %, 10.00 %" in printed
    assert entry.main(["regret", str(recorded), str(again), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["drift"] == pytest.approx({"median": 0.1, "p95": 0.1, "most": 0.1}, rel=1e-3)
    assert [problem["flips"] for problem in plain["problems"]] == [0] * len(plain["problems"])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (Command("crossover"), "name one file"),
        (Command("regret", ("a",)), "name two files"),
        (Command("region", record=Path("x")), "are for `loka bench kernels`"),
        (Command("kernels", ("gemm",), record=Path("x")), "name kinds of parts with --parts, not 'gemm'"),
        (Command("kernels", (), record=Path("x"), parts="gemms"), "no parts of the kind 'gemms'"),
        (Command("kernels", (), policy=Path("x")), "name the file with --record"),
        (Command("kernels", (), export=Path("x")), "name the one file of measurements"),
        (Command("crossover", ("nowhere.sqlite",)), "is not there"),
        (Command("crossover", ("nowhere.sqlite",), target=""), "nothing is measured for ''; write h100 or h200"),
        (Command("kernels", ("nowhere.sqlite",), export=Path("x"), target="reference"), "measured for 'reference'"),
        (Command("kernels", record=Path("x"), seconds=math.nan), "--seconds: nan is no time to work in"),
        (Command("kernels", record=Path("x"), seconds=-1), "--seconds: -1 is no time"),
        (Command("dispatch", ("nowhere.sqlite", "a,b")), "^loka bench: 'a,b' is no shape"),
    ],
)
def test_orders_that_are_not_right_say_so(order: Command, message: str) -> None:
    with pytest.raises(InputError, match=message):
        carry_out(order, print)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_recorded_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["kernels", "--record", str(tmp_path / "none.sqlite")]) == 2
    assert "no CUDA device is visible" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_parts_of_a_policy_are_those_that_its_plan_asks_for(tmp_path: Path) -> None:
    parts = parts_of((), Path("policies/ranker.yaml"))
    assert {part.work for part in parts} >= {
        PartKind.GEMM,
        PartKind.QUANTISE,
        PartKind.REQUANTIZE_TRANSPOSE,
        PartKind.FORWARD,
        PartKind.BACKWARD,
    }
    rows = {part.rows for part in parts if part.work is PartKind.GEMM and part.kernel == "torch.scaled_mm"}
    assert 4096 in rows
    gemms = parts_of(("gemm",), Path("policies/ranker.yaml"))
    assert set(gemms) == {part for part in parts if part.work is PartKind.GEMM}
    assert len(set(parts)) == len(parts)
