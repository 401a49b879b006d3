"""What interactions cost in a plan: forms, prices, look-ups, the total, the mod's gain, the file and the words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.record.run_record import parts_of_policy
from loka.cli.tables.explain_tables import show_site
from loka.cli.tables.plan_table import show_plan
from loka.cli.verbs.diff import show as show_diff
from loka.errors import InputError
from loka.kernels.measurements.interaction_forms import (
    ConcatNormForm,
    FmForm,
    Form,
    form_of,
    moved,
    parts_of,
)
from loka.kernels.measurements.lookup import Measurement, Measurements
from loka.kernels.measurements.part_bounds import bound_us, interaction_us
from loka.kernels.measurements.parts import COMPILED, INTERACTIONS, RENDERED, Part, PartKind, TimeSource
from loka.plan import planner
from loka.plan.mod_words import describe_gain
from loka.plan.plan import Gain, Plan
from loka.plan.planner import make_plan, planned
from loka.plan.select.interaction_times import kernel_names
from loka.plan.select.perf_model import PerfModel
from loka.plan.totals import format_summed, total_time
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from loka.plan.view.table import group_sites, interaction_rows
from tests.support.plan.plan_costs import HOPPER, MadeUp

pytestmark = pytest.mark.slow

BATCH = 4096
FORMS: tuple[Form, ...] = (
    FmForm(64, 32, 32, passing=True),
    FmForm(26, 16, 0),
    ConcatNormForm((32, 32), True, "layer_norm", True, True),
    ConcatNormForm((64,), True, "rms_norm", False, False),
)
WUKONG = FmForm(64, 32, 32, passing=True)
Write = Callable[..., Path]


def slow_compiler(part: Part) -> float | None:
    """torch.compile takes three times what our kernels take."""
    return 3.0 if part.work in INTERACTIONS and part.kernel == COMPILED else 1.0


def measured(*parts: Part, us: Callable[[Part], float] = lambda part: 2 * bound_us(part)) -> Measurements:
    return Measurements.of([Measurement(part, us(part), 0.01, 9, None, None) for part in parts], HOPPER)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a policy for a small Wukong with mods; `costs` take the place of measurements."""
    monkeypatch.chdir(tmp_path)

    def put(*mods: str, costs: object = None, model: str = "small_ranker", name: str = "a.yaml") -> Path:
        inputs = f"{model.removeprefix('small_')}_inputs"
        text = f'version: 1\nname: a\nmodel: {{factory: "loka.zoo:{model}", inputs: "loka.zoo:{inputs}", '
        text += f"batch_size: {BATCH}}}\ndefaults: {{compute: keep}}\n"
        text += f"mods: [{', '.join(mods)}]\n" if mods else ""
        monkeypatch.setattr(planner, "open_measurements", lambda policy: costs)
        Path(name).write_text(text)
        return Path(name)

    return put


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans are the same for all tests that only look at them."""
    return {}


def wukong(write: Write, plans: dict[str, Plan], costs: MadeUp | None = None) -> Plan:
    """The small Wukong with its interactions fused, by costs with a slow compiler unless others are given."""
    if costs is not None:
        return make_plan(write("{use: fuse_interaction}", costs=costs))
    if "wukong" not in plans:
        plans["wukong"] = make_plan(write("{use: fuse_interaction}", costs=MadeUp(factor=slow_compiler)))
    return plans["wukong"]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_is_read_back_from_its_words(form: Form) -> None:
    forward, backward = parts_of(form, BATCH, 128, RENDERED)
    assert form_of(backward.work, backward.around) == form
    assert form_of(forward.work, forward.around).words == forward.around
    assert "passing" not in forward.around


@pytest.mark.parametrize(
    ("work", "around"),
    [
        (PartKind.FM_INTERACTION, ""),
        (PartKind.FM_INTERACTION, "64 embeddings, rank x"),
        (PartKind.CONCAT_NORM, "32 rows, residual"),
        (PartKind.CONCAT_NORM, "32 rows, layer_norm, itself"),
    ],
)
def test_other_words_are_no_form(work: PartKind, around: str) -> None:
    with pytest.raises(InputError, match="has the form"):
        form_of(work, around)


def test_bytes_are_those_of_every_tensor_once() -> None:
    n, d, r, c = 64, 128, 32, 32
    mix, mix_backward = parts_of(WUKONG, 1, d, RENDERED)
    assert moved(mix) == n * d + n * r + c * d
    assert moved(mix_backward) == 3 * n * d + n * r + c * d
    join, join_backward = parts_of(FORMS[2], 1, d, RENDERED)
    assert (moved(join), moved(join_backward)) == (3 * n * d, 4 * n * d)


def test_what_was_measured_is_looked_up_between_and_beside() -> None:
    sizes = [part for rows in (1024, 16384) for part in parts_of(WUKONG, rows, 128, COMPILED)]
    found = measured(*sizes)
    assert found.time(sizes[0]).source is TimeSource.MEASURED  # type: ignore[union-attr]
    between = found.time(parts_of(WUKONG, 4096, 128, COMPILED)[0])
    assert between is not None
    assert between.source is TimeSource.INTERPOLATED
    assert between.us == pytest.approx(2 * bound_us(parts_of(WUKONG, 4096, 128, COMPILED)[0]), rel=0.02)


def test_the_nearest_form_stands_in_by_its_bytes() -> None:
    near, far = FmForm(48, 24, 24, passing=True), FmForm(64, 32, 0)
    parts = (parts_of(near, BATCH, 128, RENDERED)[1], parts_of(far, BATCH, 128, RENDERED)[1])
    found = measured(*parts, us=lambda part: (2 if part is parts[0] else 7) * bound_us(part))
    wanted = parts_of(WUKONG, BATCH, 128, RENDERED)[1]
    timed = found.time(wanted)
    assert timed is not None
    assert timed.source is TimeSource.ESTIMATED
    assert timed.us == pytest.approx(2 * bound_us(wanted), rel=1e-4)
    assert found.time(replace(wanted, kernel=COMPILED)) is None
    assert found.time(replace(wanted, dtype="float32")) is None


def test_wrong_numbers_stand_in_for_nothing() -> None:
    wanted = parts_of(WUKONG, BATCH, 128, RENDERED)[0]
    wrong = Measurement(wanted, 9.0, 0.01, 9, None, None, "3 dB")
    for part in (wanted, parts_of(FmForm(48, 24, 24), BATCH, 128, RENDERED)[0]):
        assert Measurements.of([wrong], HOPPER).time(part) is None


def test_without_measurements_our_kernels_are_estimated_by_bytes_and_the_compiler_is_not() -> None:
    perf_model = PerfModel(measured(Part(PartKind.GEMM, "as-is", 64, 64, 64)))
    forward, _ = parts_of(WUKONG, 16384, 128, RENDERED)
    latency = perf_model.part(forward)
    assert latency is not None
    assert (latency.us, latency.source) == (interaction_us(forward), TimeSource.ESTIMATED)
    assert latency.us == pytest.approx(169, rel=0.05), "as it was measured: docs/results/LOG.md"
    assert perf_model.part(replace(forward, kernel=COMPILED)) is None


def test_a_plan_holds_its_interactions_with_their_sites(write: Write, plans: dict[str, Plan]) -> None:
    plan = wukong(write, plans)
    mix, *_ = (each for each in plan.interactions if each.work is PartKind.FM_INTERACTION)
    assert (mix.owner, mix.samples, mix.columns, mix.calls) == ("layers.0", BATCH, 32, 1)
    assert mix.form == "16 embeddings, rank 8, 8 sums, passing"
    assert mix.sites == ("layers.0.rank", "layers.0.compress", "layers.0#0")
    assert plan.mods[0].gain is None  # which takes further plans
    join = next(each for each in plan.interactions if each.work is PartKind.CONCAT_NORM)
    assert (join.form, join.sites) == ("8 + 8 rows, residual, layer_norm, weight, bias", ())
    assert mix.speedup == pytest.approx(3.0, rel=1e-3)
    forward, backward = parts_of(form_of(PartKind.FM_INTERACTION, mix.form), BATCH, 32, RENDERED)
    assert mix.chosen is not None
    assert mix.chosen.forward == pytest.approx(bound_us(forward), abs=1e-3)
    assert mix.chosen.backward == pytest.approx(bound_us(backward), abs=1e-3)


def test_what_is_taken_along_is_no_gemm_of_its_own(write: Write, plans: dict[str, Plan]) -> None:
    plan = wukong(write, plans)
    timings = {site.site.name: site.timing for site in plan.sites}
    assert timings["layers.1.rank"] is timings["layers.1.compress"] is None
    assert timings["layers.1.fmb.0"] is not None
    rows = {row.pattern: row for row in group_sites(plan, alike=False)}
    assert rows["layers.1.rank"].us == "-"
    assert rows["layers.1.rank"].reason.endswith("; in the mixing layer of layers.1")
    assert rows["layers.1#0"].reason.endswith("; in the mixing layer of layers.1")
    grouped = {row.pattern: row.reason for row in group_sites(plan, alike=True)}
    assert grouped["layers.*.rank"].endswith("; in the mixing layer of layers.*")
    explained = explain(plan, "layers.1.compress")
    assert explained.untimed == "it is in the mixing layer of layers.1"
    assert explained.inside is not None
    assert kernel_names(explained.inside) == (
        "fm_interaction_16x32_to_8_8",
        "fm_interaction_backward_16x32_to_8_8_passed",
    )


def test_the_total_counts_interactions(write: Write, plans: dict[str, Plan]) -> None:
    plan = wukong(write, plans)
    total, bare = total_time(plan), total_time(replace(plan, interactions=()))
    assert total is not None
    assert bare is not None
    chosen = sum(each.chosen.us for each in plan.interactions if each.chosen is not None)
    assert total.us == pytest.approx(bare.us + chosen)
    assert total.as_is_us == pytest.approx(bare.as_is_us + 3 * chosen, rel=1e-4)
    assert total.interactions == ((TimeSource.MEASURED, 6),)
    assert format_summed(total) == "GEMMs with their norms and interactions"


def test_without_the_compilers_time_they_are_left_out_and_this_is_said(write: Write, plans: dict[str, Plan]) -> None:
    unknown = MadeUp(factor=lambda part: None if part.kernel == COMPILED and part.work in INTERACTIONS else 1.0)
    plan = wukong(write, plans, unknown)
    total = total_time(plan)
    assert total == replace(total_time(replace(plan, interactions=())), left_out=6)  # type: ignore[type-var]
    assert total is not None
    assert "without 6 interactions, never measured by torch.compile" in format_summed(total)
    (mod,) = plan.mods
    assert describe_gain(plan, mod) == "its gain is not known: never measured by torch.compile"
    assert describe_gain(plan, replace(mod, use="no_bias")) == ""
    assert {(row[4] == "-", *row[5:7]) for row in interaction_rows(plan)} == {(False, "-", "-")}


def test_the_mods_gain_is_what_its_interactions_gain(write: Write) -> None:
    path = write("{use: no_bias}", "{use: fuse_interaction}", costs=MadeUp(factor=slow_compiler))
    plan = planned(path, gains=True).plan
    bias, fuse = (mod.gain for mod in plan.mods)
    chosen = sum(each.chosen.us for each in plan.interactions if each.chosen is not None)
    total = total_time(plan)
    assert total is not None
    assert fuse is not None
    assert fuse.us == pytest.approx(2 * chosen, abs=0.1)
    assert fuse.share == pytest.approx(2 * chosen / (total.us + 2 * chosen), abs=1e-3)
    assert bias == Gain(0.0, 0.0)


def test_another_mods_gain_counts_the_joins_that_it_changes(write: Write) -> None:
    def dear_norms(part: Part) -> float:
        return 2.0 if "layer_norm" in part.around and part.work in INTERACTIONS else 1.0

    path = write("{use: block_norm, match: 'layers.*.norm', block: 32}", "{use: fuse_interaction}",
                 costs=MadeUp(factor=dear_norms))  # fmt: skip
    plan = planned(path, gains=True).plan
    joins = [
        each.chosen.us for each in plan.interactions if each.work is PartKind.CONCAT_NORM and each.chosen is not None
    ]
    assert len(joins) == 3
    assert plan.mods[0].gain is not None
    assert plan.mods[0].gain.us == pytest.approx(sum(joins), rel=1e-3)


def test_everything_is_shown(write: Write, plans: dict[str, Plan], capsys: pytest.CaptureFixture[str]) -> None:
    plan = wukong(write, plans)
    show_plan(plan, all_sites=True)
    out = capsys.readouterr().out
    assert "a mixing layer of 16 embeddings of 32, rank 8, 8 weighted sums" in out
    assert "3.00x" in out
    assert "Predicted for GEMMs with their norms and interactions by " in out
    show_site(explain(plan, "layers.1.rank"))
    out = capsys.readouterr().out
    assert "computed in a mixing layer" in out
    assert "by fm_interaction_16x32_to_8_8 and fm_interaction_backward_16x32_to_8_8_passed" in out
    without = make_plan(write("{auto: false}", costs=MadeUp(factor=slow_compiler)))
    show_diff(diff(without, plan), plan)
    out = capsys.readouterr().out
    assert "in layers.*: 0 -> 3 of them, - -> " in out
    assert "This is not the same work" in out


def test_recording_for_a_policy_asks_for_both_kernels(write: Write) -> None:
    parts = parts_of_policy(write("{use: fuse_interaction}"))
    forward, backward = parts_of(FmForm(16, 8, 8, passing=True), BATCH, 32, COMPILED)
    wanted = {forward, backward, replace(forward, kernel=RENDERED), replace(backward, kernel=RENDERED)}
    assert wanted <= set(parts)
