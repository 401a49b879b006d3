"""Regret between two recordings whose times are made up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.regret.regret import (
    RegretProblem,
    choose,
    drift,
    gemm_problems,
    judge,
    plain_table,
    summarise,
    ties,
    to_text,
)
from benchmarks.regret.regret_sites import candidates, site_problems
from loka.bench.record.grid import grid
from loka.errors import InputError
from loka.kernels.measurements.parts import Part, PartKind, PartTime, TimeSource
from loka.numerics.enums import Accumulation
from loka.plan.select.workload import SiteSizes

FIRST, SECOND, THIRD = (Part(PartKind.GEMM, name, 64, 64, 64) for name in ("a", "b", "c"))
PROBLEM = RegretProblem("one", {"a": (FIRST,), "b": (SECOND,), "c": (THIRD,)})


@dataclass(frozen=True)
class Known:
    """Times by part."""

    times: dict[Part, float]
    spread: float = 0.0
    source: TimeSource = TimeSource.MEASURED

    def time(self, part: Part) -> PartTime | None:
        us = self.times.get(part)
        return None if us is None else PartTime(us, self.spread, self.source)


def of(*us: float, spread: float = 0.0) -> Known:
    return Known(dict(zip((FIRST, SECOND, THIRD), us, strict=False)), spread)


def test_what_the_first_chooses_is_timed_by_the_second() -> None:
    outcome = judge(PROBLEM, of(1.0, 2.0, 3.0), of(3.0, 2.0, 4.0))
    assert outcome is not None
    assert (outcome.chosen, outcome.best, outcome.regret) == ("a", "b", 1.5)
    assert outcome.flipped
    assert outcome.outside


def test_a_tie_takes_the_first_in_order() -> None:
    times = {"a": PartTime(1.02, 0.01, TimeSource.MEASURED), "b": PartTime(1.0, 0.02, TimeSource.MEASURED)}
    assert choose(times) == "a"
    assert choose(dict(reversed(times.items()))) == "b"
    assert ties(times["a"], times["b"])
    assert not ties(PartTime(1.0, 0.0, TimeSource.MEASURED), PartTime(1.001, 0.0, TimeSource.MEASURED))


def test_a_flip_that_one_set_does_not_tell_apart_is_inside_a_tie() -> None:
    outcome = judge(PROBLEM, of(1.03, 1.0, 3.0, spread=0.03), of(1.2, 1.0, 4.0))
    assert outcome is not None
    assert (outcome.chosen, outcome.best) == ("a", "b")
    assert outcome.flipped
    assert not outcome.outside
    assert outcome.regret == pytest.approx(1.2)


def test_a_candidate_that_one_set_lacks_takes_no_part() -> None:
    outcome = judge(PROBLEM, of(1.0, 2.0, 0.5), of(1.0, 2.0))
    assert outcome is not None
    assert outcome.chosen == "a"
    assert judge(PROBLEM, of(1.0), of(1.0, 2.0)) is None
    guessed = Known({FIRST: 1.0, SECOND: 2.0}, source=TimeSource.INTERPOLATED)
    assert judge(PROBLEM, guessed, of(1.0, 2.0)) is None


def test_a_candidate_takes_the_time_of_all_of_its_parts() -> None:
    problem = RegretProblem("sum", {"both": (FIRST, SECOND), "one": (THIRD,)})
    outcome = judge(problem, of(1.0, 1.0, 3.0), of(1.0, 1.0, 1.0))
    assert outcome is not None
    assert (outcome.chosen, outcome.best, outcome.regret) == ("both", "one", 2.0)


def test_the_summary_has_the_geometric_mean_and_the_worst() -> None:
    problems = [PROBLEM, RegretProblem("other", {"b": (SECOND,), "c": (THIRD,)})]
    found = summarise("made up", problems, of(1.0, 2.0, 3.0), of(4.0, 2.0, 1.0))
    assert [outcome.regret for outcome in found.outcomes] == [4.0, 2.0]
    assert found.mean == pytest.approx(8**0.5)
    assert (found.worst, found.flips, found.outside) == (4.0, 2, 2)
    text = to_text([found], drift([FIRST, SECOND, THIRD], of(1.0, 2.0, 3.0), of(4.0, 2.0, 1.0)))
    assert "182.84 %" in text
    assert "300.0 %" in text
    assert "3 parts differ between the sets by (median, 95th percentile, most): 66.67 %, 300.00 %, 300.00 %" in text
    with pytest.raises(InputError, match="no measurements in common"):
        summarise("none", problems, of(), of())


def test_kernels_of_one_recipe_and_size_compete_and_the_plain_one_is_last() -> None:
    plain = Part(PartKind.GEMM, "as-is", 64, 64, 64)
    fast, precise = (
        Part(PartKind.GEMM, "torch.scaled_mm", 64, 64, 64, recipe=f"e4m3 rowwise, e4m3 rowwise, {how}")
        for how in ("fast", "precise")
    )
    second = Part(PartKind.GEMM, "z.rowwise", 64, 64, 64, recipe=fast.recipe)
    other = Part(PartKind.GEMM, "as-is", 64, 64, 64, dtype="float32")
    problems = gemm_problems(
        [plain, second, fast, precise, other, Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", 64, 64)]
    )
    assert {recipe: [list(each.candidates) for each in found] for recipe, found in problems.items()} == {
        fast.recipe: [["torch.scaled_mm", "z.rowwise", "as-is"]],
        precise.recipe: [["torch.scaled_mm", "as-is"]],
    }


def test_sites_are_run_in_every_way_that_fits_together() -> None:
    ways = candidates(SiteSizes(4096, 512, 1024), ("torch.scaled_mm", "fbgemm.rowwise"), Accumulation.FAST)
    assert len(ways) == 4 + 4 + 2 + 1
    assert list(ways)[-1] == "fprop as-is, dgrad as-is, wgrad as-is"
    assert next(iter(ways)) == "fprop torch.scaled_mm, dgrad torch.scaled_mm, wgrad torch.scaled_mm"
    plain = [part for part in ways["fprop as-is, dgrad as-is, wgrad as-is"] if part.work is PartKind.GEMM]
    assert {(part.rows, part.columns, part.contraction) for part in plain} == {
        (4096, 1024, 512), (4096, 512, 1024), (1024, 512, 4096),
    }  # fmt: skip
    transposed = [part for part in next(iter(ways.values())) if part.work is PartKind.REQUANTIZE_TRANSPOSE]
    assert len(transposed) == 3


def test_what_sites_are_made_of_is_measured_in_the_set_that_ships() -> None:
    known = set(grid())
    lacking = {part for problem in site_problems() for way in problem.candidates.values() for part in way} - known
    assert {part.work for part in lacking} <= {PartKind.QUANTIZE, PartKind.COPY}  # of transposed copies, 32768 wide
    asked = {part.columns for part in lacking}
    assert asked <= {32768}


def test_columns_of_figures_stand_to_the_right() -> None:
    assert plain_table((("a", "b"), [("x|y", "1"), ("z", "200")])) == "a      b\nx|y    1\nz    200"
