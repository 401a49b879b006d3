"""`loka probe`, then the verbs that read what it wrote: the same recipes, the same files."""

from __future__ import annotations

import pytest
import yaml

from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Compute, Gemm, Operand, Range
from loka.plan.examine import examine
from loka.probe.profile import profile_file
from loka.probe.profile.profile import Verdict

pytestmark = pytest.mark.slow

SUMMARY = "policies/profiles/shop.safetensors"
NAMED = "profile: profiles/shop.safetensors\n"
QUICK = ("--draws", "2", "--ne-batches", "0")


def test_a_static_range_is_judged_and_planned_with_what_was_seen(shop, loka, policy_text):
    shop.write_policy(policy_text + "    range: static\n" + NAMED)  # of layers.*.up
    ran = loka("probe", shop.policy, *QUICK)
    lines = ran.out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("layers.*.up"))
    for line in lines[start : start + 3]:
        assert line.split()[-1] in ("safe", "unsafe", "undecided")
        assert "static" in line
    site = profile_file.load_profile(shop.folder / SUMMARY).site("layers.0.up")
    seen = {operand.operand: operand.amax for operand in site.operands}
    own = [each for each in site.estimates if each.operands[0].range is Range.STATIC]
    assert [each.gemm for each in own] == list(Gemm)
    for each in own:
        assert each.operands[0].amax == seen[Operand.INPUT if each.gemm is Gemm.FPROP else Operand.GRAD_OUTPUT]
    planned = loka("plan", shop.policy, "--all")
    assert planned.status in (0, 1), planned.err
    assert "no evidence" not in planned.out
    assert "static(" in planned.out
    explained = loka("explain", shop.policy, "layers.0.up").out
    assert sum("(runs)" in line for line in explained.splitlines()) == 3


def test_what_the_policy_keeps_is_not_estimated_and_explain_says_so(shop, loka, policy_text):
    shop.write_policy(policy_text + "  - match: dense\n    wgrad: {compute: keep}\n" + NAMED)
    assert loka("probe", shop.policy, *QUICK).status == 0
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    head, dense = profile.site("head"), profile.site("dense")
    assert [operand.operand for operand in head.operands] == list(Operand)
    assert head.estimates == ()
    assert {each.gemm for each in dense.estimates} == {Gemm.FPROP}
    words = "no estimate of {}: loka probe makes none of what the policy keeps"
    assert words.format("fprop, dgrad, wgrad") in loka("explain", shop.policy, "head").out
    assert words.format("wgrad") in loka("explain", shop.policy, "dense").out
    assert "no estimate" not in loka("explain", shop.policy, "layers.0.up").out


@pytest.mark.parametrize("out", [None, "elsewhere.safetensors"])
def test_a_profile_that_the_base_names_lies_beside_the_base(out, shop, loka, policy_text):
    shop.write_policy(policy_text + NAMED)
    (shop.folder / "mine.yaml").write_text("version: 1\nname: mine\nextends: policies/shop.yaml\n", encoding="utf-8")
    ran = loka("probe", "mine.yaml", "--steps", "2", *QUICK, *(() if out is None else ("-o", out)))
    assert ran.status == 0, ran.err
    written = out or SUMMARY
    assert (shop.folder / written).is_file()
    if out is None:
        assert "add to" not in ran.out
        assert loka("plan", "mine.yaml").status in (0, 1)
        checked = loka("probe", "mine.yaml", "--check")
        assert checked.out.splitlines()[0].startswith(f"{SUMMARY}: ")
    else:
        assert "for this one, in mine.yaml: profile: elsewhere.safetensors" in ran.out


@pytest.mark.parametrize(
    "recipe",
    ["scaling: tensorwise", "range: static", "power_of_two: true\n  requantize_transpose: true"],
)
def test_each_remedy_that_is_a_rule_can_be_pasted_into_the_policy(recipe, shop, loka, policy_text):
    """Also beside settings of the policy that the remedy has to undo: what comes of it is a recipe that is safe."""
    mine = f"  compute: fp8\n  {recipe}\n  budget: {{mere: 0.15}}\n"
    shop.write_policy(policy_text.replace("  compute: fp8\n", mine, 1) + NAMED)
    assert loka("probe", shop.policy, "--every", "2", "--ne-batches", "0").status == 0
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    rules = {finding.remedy for finding in profile.findings if finding.remedy.startswith("rules: ")}
    assert len(rules) > 5
    for rule in rules:
        (shop.folder / "policies/mine.yaml").write_text(
            f"version: 1\nname: mine\nextends: shop.yaml\n{rule}\n", encoding="utf-8"
        )
        ((match, name), (gemm, asked)) = yaml.safe_load(rule)["rules"][0].items()
        examined = examine(load_policy("policies/mine.yaml"))
        ((site, settings),) = [
            each for each in zip(examined.sites, examined.settings, strict=True) if each[0].name == name
        ]
        wanted = settings.gemms[Gemm(gemm)]
        if asked == {"compute": "keep"}:
            assert wanted.compute is Compute.KEEP
        else:
            estimate = profile.site(site.name).estimate(Gemm(gemm), wanted.operands)
            assert (match, estimate.verdict(settings.budget)) == ("match", Verdict.SAFE)
