"""`loka probe` on a small model: what it writes, prints and leaves with."""

from __future__ import annotations

import json
import shutil

import pytest

from loka.probe.profile import profile_file
from loka.probe.profile.profile import Profile, RecordedStats

pytestmark = pytest.mark.slow

SUMMARY = "policies/profiles/shop.safetensors"
FULL = "policies/profiles/shop.full.safetensors"
IGNORE = "policies/profiles/.gitignore"
FEW = ("--draws", "2")
QUICK = (*FEW, "--ne-batches", "0")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """The folder of the shop's profiles, which the first test that asks for them makes."""
    return tmp_path_factory.mktemp("probed") / "profiles"


@pytest.fixture
def probed(shop, loka, profiles):
    """The shop with a profile."""
    if not profiles.is_dir():
        ran = loka("probe", shop.policy, *QUICK)
        assert ran.status == 0, ran.err
        shutil.copytree(shop.folder / "policies/profiles", profiles)
    shutil.copytree(profiles, shop.folder / "policies/profiles", dirs_exist_ok=True)
    return shop


def test_both_forms_are_written_and_told(shop, loka):
    before = set(shop.files())
    ran = loka("probe", shop.policy)
    assert ran.status == 0, ran.err
    assert set(shop.files()) - before == {SUMMARY, FULL, IGNORE}
    assert shop.files()[IGNORE] == b"*.full.safetensors\n*.interrupted.safetensors\n"
    summary, full = profile_file.load(shop.folder / SUMMARY), profile_file.load(shop.folder / FULL)
    assert isinstance(summary, Profile)
    assert isinstance(full, RecordedStats)
    assert full.profile == summary
    assert (summary.steps, summary.every, summary.samples, summary.batch_size) == (12, 1, 12, 64)
    assert [site.name for site in summary.sites if not site.estimates] == ["head"]  # the policy keeps it
    sizes = {name: len(shop.files()[name]) for name in (SUMMARY, FULL)}
    for name, size in sizes.items():
        assert f"{name}: {size / 1000:.0f} kB" in ran.out
    assert "profile: " not in ran.out  # at its default place it is used without being named
    assert ran.err.splitlines()[-2].startswith("time: training ")
    assert ran.err.splitlines()[-1] == "next: loka plan policies/shop.yaml"
    elsewhere = loka("probe", shop.policy, "-o", "elsewhere.safetensors", *QUICK)
    assert elsewhere.out.splitlines()[-1].endswith("add to policies/shop.yaml: profile: ../elsewhere.safetensors")


def test_the_table_has_a_line_for_each_gemm_that_is_not_kept(shop, loka):
    out = loka("probe", shop.policy, *QUICK).out
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("layers.*.down"))
    assert lines[start].split()[1:8] == ["2", "64", "32", "24", "fprop", "e4m3", "rowwise"]
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["dgrad", "wgrad"]
    estimate = profile_file.load_profile(shop.folder / SUMMARY).site("layers.0.down").estimates[0]
    assert lines[start].split()[-1] in ("safe", "unsafe", "undecided")
    assert abs(float(lines[start].split()[8]) - estimate.mere.mean) < 0.05
    head = next(line for line in lines if line.startswith("head"))
    assert head.split()[1:] == ["1", "64", "32", "1", "kept"]
    dense = next(index for index, line in enumerate(lines) if line.startswith("dense"))
    assert lines[dense + 1].split()[0] == "wgrad"  # its input needs no gradient


def test_two_runs_give_the_same_profile_but_for_the_time(probed, loka):
    first = profile_file.load_profile(probed.folder / SUMMARY)
    assert loka("probe", probed.policy, "-o", "again.safetensors", *QUICK).status == 0
    second = profile_file.load_profile(probed.folder / "again.safetensors")
    assert (first.sites, first.findings, first.samples) == (second.sites, second.findings, second.samples)
    assert loka("probe", probed.policy, "-o", "other.safetensors", "--seed", "1", *QUICK).status == 0
    assert profile_file.load_profile(probed.folder / "other.safetensors").sites != first.sites


def test_json_holds_what_the_table_shows(shop, loka):
    ran = loka("probe", shop.policy, "--json")
    data = json.loads(ran.out)
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    assert (data["profile"], data["full"], data["samples"]) == (SUMMARY, FULL, 12)
    assert set(data["seconds"]) == {"training", "NE", "estimating"}
    sites = {site["site"]: site for site in data["sites"]}
    assert [gemm["gemm"] for gemm in sites["dense"]["gemms"]] == ["fprop", "wgrad"]
    fprop = sites["layers.0.up"]["gemms"][0]
    known = profile.site("layers.0.up").estimates
    assert fprop["mere"]["mean"] in [estimate.mere.mean for estimate in known]
    assert fprop["operands"][0]["format"] == "e4m3"
    assert len(data["findings"]) == len(profile.findings)


def test_steps_and_every_decide_the_samples(shop, loka):
    assert loka("probe", shop.policy, "--steps", "9", "--every", "4", *QUICK).status == 0
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    assert (profile.every, profile.samples) == (4, 2)
    assert profile.steps <= 9
    ran = loka("probe", shop.policy, "--steps", "50", "--every", "6", *QUICK)
    assert ran.status == 0
    assert "the batches ended after 12 of 50 steps" in ran.err
    assert profile_file.load_profile(shop.folder / SUMMARY).samples == 2


def test_draws_are_those_asked_for_at_most(shop, loka, policy_text):
    """A budget between what two draws say stays open until the last."""
    shop.write_policy(policy_text.replace("  compute: fp8\n", "  compute: fp8\n  budget: {mere: 0.15}\n", 1))
    assert loka("probe", shop.policy, "--draws", "5").status == 0
    full = "policies/profiles/shop.full.safetensors"
    draws = [each.draws for site in profile_file.load_profile(shop.folder / SUMMARY).sites for each in site.estimates]
    assert max(draws) == 5
    assert loka("probe", shop.policy, "--from", full, "--draws", "2").status == 0
    draws = [each.draws for site in profile_file.load_profile(shop.folder / SUMMARY).sites for each in site.estimates]
    assert set(draws) == {2}


def test_the_last_batch_may_be_smaller(shop, loka):
    shop.edit_model("torch.randn(self.batch_size, 13,", "torch.randn(self.batch_size - 23 * (_ == self.count - 1), 13,")
    assert loka("probe", shop.policy, *QUICK).status == 0
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    assert profile.site("dense").operands[0].rows == 12 * 64 - 23


def test_the_policy_needs_no_test_rows_to_probe(shop, loka, policy_text):
    shop.write_policy(policy_text.replace('  test: "shopmodel:test_batches"\n', ""))
    assert loka("probe", shop.policy, "--steps", "2", *FEW).status == 0


def test_a_large_full_form_is_left_out(shop, loka):
    ignored = shop.folder / IGNORE
    ignored.parent.mkdir(parents=True, exist_ok=True)
    ignored.write_text("own\n")
    ran = loka("probe", shop.policy, "--full", "0.001", *QUICK)
    assert ran.status == 0, ran.err
    assert "more than the 0.001 MB of --full: left out" in ran.out
    assert SUMMARY in shop.files()
    assert FULL not in shop.files()
    assert json.loads(loka("probe", shop.policy, "--full", "0.001", "--json", *QUICK).out)["full"] is None
    assert ignored.read_text() == "own\n"  # as it was


def test_full_profiles_merge(shop, loka):
    for seed in ("1", "2"):
        assert loka("probe", shop.policy, "--seed", seed, "-o", f"run{seed}.safetensors", *QUICK).status == 0
    files = [f"run{seed}.full.safetensors" for seed in ("1", "2")]
    ran = loka("probe", shop.policy, *FEW, "--from", *files)
    assert ran.status == 0, ran.err
    merged = profile_file.load_profile(shop.folder / SUMMARY)
    parts = [profile_file.load_profile(shop.folder / name) for name in files]
    assert merged.samples == 24
    assert merged.site("dense").operands[0].sampled == sum(part.site("dense").operands[0].sampled for part in parts)
    assert [site.name for site in merged.sites if not site.estimates] == ["head"]


def test_check_is_within_on_the_same_data_and_writes_nothing(probed, loka):
    before = probed.files()
    ran = loka("probe", probed.policy, "--check", "--seed", "5")
    assert (ran.status, probed.files()) == (0, before), ran.err
    assert ran.out.splitlines()[0].startswith(f"{SUMMARY}: 12 samples over 12 training steps")
    assert "drifted" not in ran.out
    data = json.loads(loka("probe", probed.policy, "--check", "--json").out)
    assert data["drifted"] is False
    assert {row["operand"] for row in data["operands"]} == {"input", "grad_output"}


def test_check_leaves_with_1_where_the_data_changed(probed, loka):
    probed.edit_model("yield (x,)", "yield (64 * x,)")
    before = probed.files()
    ran = loka("probe", probed.policy, "--check")
    assert (ran.status, probed.files()) == (1, before)
    first = ran.out.splitlines()[3]
    assert "drifted" in first
    assert float(first.split()[2]) > 5
    assert "run loka probe again" in ran.err
    assert "patch.keep('" in ran.err


@pytest.mark.parametrize("after", [0, 7])
def test_ctrl_c_keeps_what_was_sampled(after, shop, loka, policy_text):
    shop.edit_model(
        "            x = torch.randn(self",
        f"            if _ == {after}:\n                raise KeyboardInterrupt\n            x = torch.randn(self",
    )
    before = set(shop.files())
    ran = loka("probe", shop.policy)
    assert (ran.status, ran.out) == (130, "")
    kept = "policies/profiles/shop.interrupted.safetensors"
    if not after:
        assert "nothing was written" in ran.err
        assert set(shop.files()) == before
        return
    assert f"interrupted: 7 samples are in {kept}" in ran.err
    assert set(shop.files()) - before == {kept}
    assert loka("probe", shop.policy, "--from", kept, *FEW).status == 0
    assert profile_file.load_profile(shop.folder / SUMMARY).samples == 7


def test_ctrl_c_while_estimating_keeps_the_samples(shop, loka, monkeypatch):
    from loka.probe import learn

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(learn, "finish", interrupted)
    ran = loka("probe", shop.policy)
    assert ran.status == 130
    assert isinstance(profile_file.load(shop.folder / "policies/profiles/shop.interrupted.safetensors"), RecordedStats)
    assert not (shop.folder / SUMMARY).exists()


def test_findings_are_printed_once_for_sites_that_are_alike(shop, loka):
    shop.edit_model("low = torch", "x = x * torch.tensor([4096.0] + [1.0] * 31)\n        low = torch")
    out = loka("probe", shop.policy, *QUICK).out
    start = out.index("feature_dominates: layers.*.down, 2 sites")
    evidence, remedy = out[start:].splitlines()[1:3]
    assert evidence.strip().startswith("layers.0.down: input: feature 0 reaches ")
    assert remedy.strip().startswith('in the model, bring the features that meet in "layers.*.down" to one size')
    assert "mods:" not in remedy  # its input is followed by no norm in an nn.Sequential
