"""The verbs on a policy that names a profile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from loka.numerics.enums import Gemm
from loka.probe.profile.profile_file import save
from tests.support.plan.shop_profile import profile_of

pytestmark = pytest.mark.slow

FILE = "policies/profiles/shop.safetensors"
POLICY = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}
profile: profiles/shop.safetensors
defaults: {compute: COMPUTE}
"""


def policy(compute: str = "auto", more: str = "") -> str:
    return POLICY.replace("COMPUTE", compute) + more


@pytest.fixture
def learned(shop) -> Callable[..., None]:
    """Writes the profile and the policy."""

    def write(compute: str = "auto", more: str = "", **mere: float) -> None:
        save(shop.folder / FILE, profile_of({name.replace("__", "."): value for name, value in mere.items()}))
        shop.write_policy(policy(compute, more))

    return write


def reason_of(text: str, site: str) -> str:
    """What stands in the legend under the number of a site's row."""
    number = next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{site} "))
    return next(line for line in text.splitlines() if line.startswith(f"{number}: "))


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_forced_over_budget_prints_the_plan_and_leaves_with_1(arguments, shop, loka, learned):
    learned("fp8", **{"layers__0__up": 0.3})
    ran = loka("plan", shop.policy, *arguments)
    assert ran.status == 1
    assert ran.err.startswith("3 GEMMs are over budget by profiles/shop.safetensors")
    for gemm in Gemm:
        assert f"  layers.0.up {gemm.value}: MERE 0.3 [0.29, 0.31] over the budget 0.2\n" in ran.err
    if arguments:
        assert len(json.loads(ran.out)["over_budget"]) == 3
    else:
        assert "over budget: MERE 0.3" in reason_of(ran.out, "layers.0.up")


def test_generate_and_validate_warn_of_what_is_over_budget(shop, loka, learned):
    learned("fp8", **{"layers__0__up": 0.3})
    for verb in ("generate", "validate"):
        ran = loka(verb, shop.policy)
        assert ran.status == 0
        assert ran.err.startswith("warning: 3 GEMMs are over budget")
    assert (shop.folder / "generated/shop/manifest.json").is_file()
    learned("fp8")
    assert loka("validate", shop.policy).err == ""


def test_a_package_is_stale_when_its_profile_changed(shop, loka, learned):
    learned("fp8")
    assert loka("generate", shop.policy).status == 0
    assert loka("generate", shop.policy, "--check").status == 0
    manifest = json.loads((shop.folder / "generated/shop/manifest.json").read_text())
    assert "profile profiles/shop.safetensors" in manifest["inputs"]
    changed = profile_of({})
    save(shop.folder / FILE, replace(changed, findings=()))  # nothing that decides
    stale = loka("generate", shop.policy, "--check")
    assert stale.status == 1
    assert "manifest.json: stale: the policy, its profile, measurements, the model or LoKA changed since" in stale.err


def test_the_same_profile_gives_the_same_bytes_from_any_directory(shop, loka, learned, monkeypatch):
    learned()
    assert loka("generate", shop.policy, "--out", "one").status == 0
    monkeypatch.chdir(shop.folder / "policies")
    monkeypatch.syspath_prepend(str(shop.folder))
    assert loka("generate", "shop.yaml", "--out", str(shop.folder / "two")).status == 0
    assert loka("generate", str(shop.folder / shop.policy), "--out", str(shop.folder / "three")).status == 0
    for file in (shop.folder / "one").iterdir():
        assert file.read_bytes() == (shop.folder / "two" / file.name).read_bytes()
        assert file.read_bytes() == (shop.folder / "three" / file.name).read_bytes()


@pytest.mark.parametrize("verb", ["plan", "validate", "generate", "explain"])
def test_a_missing_profile_is_an_error_at_its_field(verb, shop, loka):
    shop.write_policy(policy())
    ran = loka(verb, shop.policy, *(("dense",) if verb == "explain" else ()))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("policies/shop.yaml:4:10: profile: policies/profiles/shop.safetensors is not there")
    assert "run loka probe policies/shop.yaml" in ran.err


def test_what_is_no_profile_is_an_error_at_its_field(shop, loka):
    shop.write_policy(policy())
    path = shop.folder / FILE
    path.parent.mkdir()
    path.write_bytes(b"not a profile at all")
    ran = loka("plan", shop.policy)
    assert ran.status == 2
    assert ran.err.startswith(f"policies/shop.yaml:4:10: profile: {FILE}: ")
    path.unlink()
    path.mkdir()
    assert loka("plan", shop.policy).status == 2


def test_a_profile_of_another_model_is_refused(shop, loka, learned):
    learned()
    save(shop.folder / FILE, replace(profile_of({}), model="other:build"))
    ran = loka("plan", shop.policy)
    assert ran.status == 2
    assert "policies/shop.yaml:4:10: profile: " in ran.err
    assert "was learned of other:build, and this policy is for shopmodel:build" in ran.err


def test_the_profile_of_a_base_is_found_beside_the_base(shop, loka, learned):
    learned()
    (shop.folder / "mine.yaml").write_text("version: 1\nname: mine\nextends: policies/shop.yaml\n")
    ran = loka("plan", "mine.yaml")
    assert ran.status == 0
    assert "safe by evidence" in reason_of(ran.out, "dense")


def test_without_the_model_a_policy_is_valid_before_its_profile_is_there(shop, loka):
    shop.write_policy(policy(more="rules:\n- {match: dense, fprop: {input: {range: static}}}\n"))
    assert loka("validate", shop.policy, "--no-model").status == 0


def test_a_static_range_comes_from_the_profile_into_the_code(shop, loka, learned):
    learned("fp8", "rules:\n- {match: '*.up', range: static}\n")
    assert loka("generate", shop.policy).status == 0
    assert "2.5" in (shop.folder / "generated/shop/kernels.py").read_text()
    explained = loka("explain", shop.policy, "layers.0.up").out
    line = next(line for line in explained.splitlines() if line.startswith("fprop.input.amax "))
    assert "the largest |x| seen in profiles/shop.safetensors" in line


def test_explain_draws_in_plain_characters_where_blocks_cannot_be_shown(shop, loka, learned, monkeypatch):
    from loka.cli.tables import explain_tables

    learned()
    monkeypatch.setattr(explain_tables, "_shows", lambda text: False)
    lines = loka("explain", shop.policy, "dense").out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("input: "))
    assert "@" in lines[at + 1]
    assert lines[at + 1].isascii()


@pytest.mark.parametrize(("encoding", "shows"), [("utf-8", True), ("ascii", False), ("latin-1", False), (None, False)])
def test_what_a_terminal_shows_goes_by_its_encoding(encoding, shows, monkeypatch):
    from loka.cli.tables.explain_tables import _shows

    class Out:
        pass

    out = Out()
    out.encoding = encoding
    monkeypatch.setattr(sys, "stdout", out)
    assert _shows("▁█") is shows
