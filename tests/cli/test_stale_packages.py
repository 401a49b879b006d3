"""What makes a generated package stale, and what `generate` says of one without FP8."""

from __future__ import annotations

import sys
import warnings

import pytest

from loka.cli.verbs.generate import without_fp8
from loka.dispatch.dispatch_errors import NoFp8Warning
from loka.probe.profile.profile_file import save
from tests.support.plan.shop_profile import profile_of

TRAIN = '  loss: "shopmodel:loss"\n'


@pytest.mark.slow
def test_settings_of_training_make_no_package_stale(shop, loka, policy_text):
    shop.write_policy(policy_text.replace(TRAIN, f"{TRAIN}  learning_rate: 1.0e-3\n  ema: 0.9\n"))
    assert loka("generate", shop.policy).status == 0
    shop.write_policy(policy_text.replace(TRAIN, f"{TRAIN}  learning_rate: 2.0e-3\n  ema: 0 # none\n"))
    ran = loka("generate", "--check", shop.policy)
    assert (ran.status, ran.err) == (0, "")
    shop.write_policy(policy_text.replace(TRAIN, f"{TRAIN}  learning_rate: 2.0e-3\n  ema: 0\n").replace("64", "128"))
    assert loka("generate", "--check", shop.policy).status == 1


@pytest.mark.slow
def test_a_shape_that_is_not_the_profiles_is_staleness(shop, loka, policy_text):
    save(shop.folder / "policies/profiles/shop.safetensors", profile_of({}))
    shop.write_policy(policy_text.replace("defaults", "profile: profiles/shop.safetensors\ndefaults"))
    assert loka("generate", shop.policy).status == 0
    model = shop.folder / "shopmodel.py"
    model.write_text(model.read_text().replace("nn.Linear(13, 32)", "nn.Linear(13, 48)").replace("(32)", "(48)"))
    model.write_text(model.read_text().replace("Cross(32)", "Cross(48)").replace("Linear(32, 1)", "Linear(48, 1)"))
    sys.modules.pop("shopmodel", None)
    checked, generated = loka("generate", "--check", shop.policy), loka("generate", shop.policy)
    assert (checked.status, generated.status) == (1, 2)
    assert checked.err == generated.err
    assert "K = 13, N = 48 in the model: the model changed, run loka probe again" in checked.err


@pytest.mark.slow
def test_a_package_without_fp8_is_warned_of_and_says_why(shop, loka, policy_text):
    shop.write_policy(policy_text.replace("compute: fp8", "compute: keep").split("rules:")[0])
    ran = loka("generate", shop.policy)
    assert ran.status == 0
    assert ran.err.startswith("warning: the package holds no FP8 site: ")
    assert ran.err.endswith(": keep by shop.yaml:9; run loka plan policies/shop.yaml to see why\n")

    from loka.cli.train_and_compare import load_package, patcher, verify

    package = load_package("shop")
    import shopmodel

    with pytest.warns(NoFp8Warning, match="nothing in this model changes; run loka plan to see why"):
        patch = package.apply(shopmodel.build())
    with pytest.warns(NoFp8Warning, match="the package holds no FP8 site"):
        patch.verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(patch)  # `loka train` has shown the warning of apply
        patcher(package, quiet=True)(shopmodel.build())


def test_a_model_without_gemms_is_the_reason(plan_without_sites):
    assert without_fp8(plan_without_sites) == "the package holds no FP8 site: the model has no GEMM"


@pytest.fixture
def plan_without_sites():
    from loka.plan.plan import Plan

    return Plan(name="empty", target="h100", batch_size=64, policy_files=(), bindings=(), sites=())


SETTINGS = 'import json\nfrom pathlib import Path\n\nSCALE = json.loads(Path("settings.json").read_text())["scale"]\n'


@pytest.mark.slow
def test_a_setting_that_a_forward_reads_is_seen_and_no_plan_is_kept(shop, loka, tmp_path, monkeypatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))  # of earlier versions
    model, settings = shop.folder / "shopmodel.py", shop.folder / "settings.json"
    model.write_text(SETTINGS + model.read_text().replace("return self.norm(", "return SCALE * self.norm("))
    for scale in ("2.0", "3.0"):
        settings.write_text(f'{{"scale": {scale}}}')
        sys.modules.pop("shopmodel", None)
        assert loka("generate", "--check", shop.policy).status == 1
        assert loka("generate", shop.policy).status == 0
        assert loka("generate", "--check", shop.policy).status == 0
        text = (shop.folder / "generated/shop/__init__.py").read_text()
        assert f"= mul(v2, {scale})" in text or f"= mul({scale}, v2)" in text
    assert not (tmp_path / "cache").exists()
