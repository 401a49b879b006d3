"""What an ablation compares: rows, columns, the policies of its units, and the targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.ablation.__main__ import check, parsed
from benchmarks.ablation.ablation_targets import TARGETS, judged
from benchmarks.ablation.rows_columns import BASE, AblationRow, Column, Kinds, chosen, mods_of, rows_of, unit_of
from loka.errors import InputError
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy

PAPER = ("no_bias", "block_norm", "hard_swish")
MODS = (*PAPER, "fuse_interaction")
TEXT = """\
version: 1
name: clicks
model:
  factory: tests.support.models.ablation_model:build
  inputs: tests.support.models.ablation_model:inputs
  batch_size: 64
profile: evidence.safetensors
measurements: times.jsonl
defaults: {compute: fp8, scaling: rowwise}
rules:
  - {match: "head", compute: keep}
mods:
  - {use: no_bias, except: "head"}
  - {use: block_norm, block: 16}
  - {use: hard_swish}
  - {use: fuse_interaction, match: "layers.*", optional: true}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    path = tmp_path / "clicks.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return load_policy(path)


def test_rows_are_in_the_order_of_what_matters_most() -> None:
    rows = rows_of(MODS, {"fuse_interaction"})
    assert [row.name for row in rows] == [
        "none", "all", "exact", "no_bias", "block_norm", "hard_swish",
        "all-no_bias", "all-block_norm", "all-hard_swish", "all-fuse_interaction",
    ]  # fmt: skip
    assert rows[0] == BASE
    assert rows[1].mods == MODS
    assert rows[-1].mods == PAPER
    assert rows[2] == AblationRow(
        "exact", ("fuse_interaction",), f"{rows[2].title.split(';')[0]}; fuse_interaction alone"
    )
    assert rows[6].mods == ("block_norm", "hard_swish", "fuse_interaction")


def test_the_same_subset_is_one_row() -> None:
    rows = rows_of(("no_bias", "hard_swish"), ())
    assert [row.name for row in rows] == ["none", "all", "no_bias", "hard_swish"]
    assert rows[2].title == "no_bias alone; all but hard_swish"
    assert [row.name for row in rows_of(("no_bias",), ())] == ["none", "all"]
    assert [row.name for row in rows_of(("merge_siblings",), {"merge_siblings"})] == ["none", "all"]


def test_rows_and_columns_are_chosen_by_name() -> None:
    rows = rows_of(MODS, {"fuse_interaction"})
    assert chosen(None, rows) == (rows, tuple(Column))
    some, columns = chosen("loka-fp8, all,exact", rows)
    assert [row.name for row in some] == ["all", "exact"]
    assert columns == (Column.FP8,)
    assert chosen("loka-bf16", rows) == (rows, (Column.OURS,))
    with pytest.raises(InputError, match=r"--only: there is no 'all-nobias'.*did you mean all-no_bias"):
        chosen("all-nobias", rows)
    with pytest.raises(InputError, match="--only: names none"):
        chosen(" ,", rows)


def test_mods_are_those_of_the_policy_each_once(policy: Policy, tmp_path: Path) -> None:
    assert mods_of(policy) == MODS
    other = tmp_path / "other.yaml"
    other.write_text("version: 1\nname: other\nextends: clicks.yaml\nmods: [{use: no_bias, match: head}]\n", "utf-8")
    assert mods_of(load_policy(other)) == MODS
    bare = tmp_path / "bare.yaml"
    bare.write_text(TEXT[: TEXT.index("mods:")], "utf-8")
    with pytest.raises(InputError, match=r"bare\.yaml.*has no mods to ablate"):
        mods_of(load_policy(bare))


def test_which_mods_change_modules_and_which_are_exact() -> None:
    kinds = Kinds.of((*MODS, "merge_siblings", "norm_first"))
    assert kinds.adapting == {*PAPER, "norm_first"}
    assert kinds.exact == {"fuse_interaction", "merge_siblings"}


def test_a_unit_is_the_policy_with_the_mods_of_its_row(policy: Policy, tmp_path: Path) -> None:
    kinds = Kinds.of(MODS)
    row = AblationRow("some", ("block_norm", "fuse_interaction"), "")
    unit = unit_of(policy, row, Column.FP8, kinds, whole=False)
    tree = yaml.safe_load(unit.text)
    assert tree["name"] == unit.package == "ablation_loka_fp8_block_norm_fuse_interaction"
    assert [entry["use"] for entry in tree["mods"]] == ["block_norm", "fuse_interaction"]
    assert tree["mods"][0]["block"] == 16
    assert tree["rules"] == [{"match": "head", "compute": "keep", "optional": True}]
    assert "profile" not in tree
    assert tree["measurements"] == str(tmp_path.resolve() / "times.jsonl")
    path = tmp_path / "unit.yaml"
    path.write_text(unit.text, "utf-8")
    assert [rule.use for rule in load_policy(path).mods] == ["block_norm", "fuse_interaction"]


def test_the_profile_speaks_of_the_model_with_all_mods_in_fp8_alone(policy: Policy, tmp_path: Path) -> None:
    kinds, row = Kinds.of(MODS), AblationRow("all", MODS, "")
    texts = {column: yaml.safe_load(unit_of(policy, row, column, kinds, whole=True).text) for column in Column}
    assert texts[Column.FP8]["profile"] == str(tmp_path.resolve() / "evidence.safetensors")
    assert "profile" not in texts[Column.OURS]
    assert texts[Column.OURS]["rules"][-1] == {"match": "*", "compute": "keep", "fuse": "always", "optional": True}
    assert len(texts[Column.FP8]["rules"]) == 1


def test_mods_that_torch_compile_does_not_see_make_no_unit_of_their_own(policy: Policy) -> None:
    kinds = Kinds.of(MODS)
    exact = AblationRow("exact", ("fuse_interaction",), "")
    of = {column: [unit_of(policy, row, column, kinds, False) for row in (BASE, exact)] for column in Column}
    assert of[Column.COMPILED][0] == of[Column.COMPILED][1]
    assert of[Column.OURS][0] != of[Column.OURS][1]


def test_the_baseline_is_measured_whatever_is_chosen(policy: Policy) -> None:
    work = check(parsed([str(policy.path), "--modes", "train", "--only", "all,loka-fp8", "--batch", "8"]))
    assert list(work.units) == [("none", Column.COMPILED), ("all", Column.FP8)]
    assert work.columns == (Column.COMPILED, Column.FP8)
    assert [row.name for row in work.rows] == ["none", "all"]
    assert work.wanted.modes == ("train",)
    assert yaml.safe_load(work.units["all", Column.FP8].text)["model"]["batch_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clicks.yaml", "--batch", "0"], "--batch: 0 is too few"),
        (["clicks.yaml", "--loss-steps", "-1"], "--loss-steps: -1 is too few"),
        (["clicks.yaml", "--loss-steps", "5"], "clicks.yaml.*no train section"),
        (["clicks.yaml", "--jobs", "-1"], "--jobs: -1 is too few"),
        (["clicks.yaml", "--seconds", "0"], "--seconds: 0 is no time"),
        (["clicks.yaml", "--modes", "training"], "--modes: there is no 'training'"),
        (["clicks.yaml", "--modes", ","], "--modes: names none"),
        (["clicks.yaml", "--only", "every"], "--only: there is no 'every'"),
        (["wukong_small"], "wukong_small"),
    ],
)
@pytest.mark.usefixtures("policy")
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        check(parsed(arguments))


def times(row: str, column: Column, mode: str) -> float | None:
    """A base of 30 ms in training and 9 ms in inference; FP8 with mods 15 and 5."""
    known = {
        ("none", Column.COMPILED, "train"): 30e3, ("all", Column.OURS, "train"): 20e3,
        ("all", Column.FP8, "train"): 15e3, ("exact", Column.OURS, "train"): 30e3,
        ("all", Column.COMPILED, "infer"): 9e3, ("all", Column.FP8, "infer"): 5e3,
    }  # fmt: skip
    return known.get((row, column, mode))


def test_targets_are_of_the_papers_mods_and_of_the_exact_ones() -> None:
    rows, exact = rows_of(MODS, {"fuse_interaction"}), frozenset({"fuse_interaction"})
    found = judged(rows, exact, times)
    assert len(TARGETS) == 5
    of_all = [each for each in found if each.row == "all"]
    assert [round(each.ratio or 0, 3) for each in of_all] == [1.5, 2.0, 1.333, 1.8]
    assert [each.verdict for each in of_all] == ["reached"] * 4
    (alone,) = [each for each in found if each.target.exact]
    assert (alone.row, alone.ratio, alone.verdict) == ("exact", 1.0, "missed")
    bare = [each for each in found if each.row == "all-fuse_interaction"]  # the paper's three and nothing else
    assert [each.verdict for each in bare] == ["not measured"] * 4
    assert len(found) == 9


def test_without_the_papers_mods_there_are_no_targets_of_them() -> None:
    rows = rows_of(("no_bias", "merge_siblings"), {"merge_siblings"})
    found = judged(rows, frozenset({"merge_siblings"}), times)
    assert [each.target.exact for each in found] == [True]
