"""What can be wrong when `loka probe` is called: a message with what to do, the right status, nothing written."""

from __future__ import annotations

import os
import sys

import pytest

from loka.probe.profile import profile_file

pytestmark = pytest.mark.slow

SUMMARY = "policies/profiles/shop.safetensors"


def refused(ran, before, shop, *words, status=2):
    assert ran.status == status, ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert shop.files() == before
    for word in words:
        assert word in ran.err, ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "0"], ["--every"]),
        (["--steps", "0"], ["--steps"]),
        (["--steps", "3", "--every", "4"], ["--steps is 3 and --every 4", "lower --every"]),
        (["--every", "13"], ["no step was sampled", "12 steps"]),
        (["-o", "policies"], ["policies is a folder"]),
        (["-o", "/dev/null"], ["/dev/null: cannot be written: it is a device or a pipe"]),
        (["-o", "shopmodel.py/x.safetensors"], ["shopmodel.py is not a folder"]),
        (["--from", "absent.full.safetensors"], ["absent.full.safetensors: no such profile"]),
        (["--from", "shopmodel.py"], ["shopmodel.py"]),
        (["other.yaml"], ["one policy", "'other.yaml'"]),
        (["--from", "a", "--check"], ["--from", "--check"]),
        (["--from", "a", "--steps", "3"], ["leave out --steps"]),
        (["--from", "a", "--device", "cpu"], ["leave out --device"]),
        (["--check", "-o", "x"], ["--check writes nothing"]),
        (["--check", "--draws", "8"], ["leave out --draws"]),
        (["--draws", "1"], ["--draws"]),
        (["--check"], [f"{SUMMARY}: no such profile", "loka probe"]),
        (["--device", "tpu"], ["--device is 'tpu'"]),
    ],
)
def test_options_that_cannot_be_meant(arguments, words, shop, loka):
    before = shop.files()
    refused(loka("probe", shop.policy, *arguments), before, shop, *words)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_known_before_training(shop, loka):
    folder = shop.folder / "locked"
    folder.mkdir(mode=0o500)
    before = shop.files()
    refused(loka("probe", shop.policy, "-o", "locked/x.safetensors"), before, shop, "no permission in")


def test_a_policy_that_is_not_there_or_broken(shop, loka, policy_text):
    before = shop.files()
    refused(loka("probe", "policies/absent.yaml"), before, shop, "policies/absent.yaml: no such file")
    policy = shop.write_policy(policy_text.replace("compute: fp8", "compute: fp9"))
    before = shop.files()
    refused(loka("probe", policy), before, shop, f"{policy}:9:12: ")


def test_a_policy_without_a_train_section(shop, loka, policy_text):
    start = policy_text.index("train:")
    policy = shop.write_policy(policy_text[:start] + policy_text[policy_text.index("defaults:") :])
    before = shop.files()
    refused(loka("probe", policy), before, shop, f"{policy}:1:1: the policy has no train section; add")


@pytest.mark.parametrize(("field", "line"), [("batches", 2), ("loss", 6)])
def test_training_callables_that_raise(field, line, shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "late", raising=False)
    (shop.folder / "late.py").write_text(
        "def batches(batch_size, seed):\n    yield 1 / 0\n\n\ndef loss(output, target):\n    return output.nope()\n"
    )
    policy = shop.write_policy(policy_text.replace(f"shopmodel:{field}", f"late:{field}"))
    before = shop.files()
    ran = loka("probe", policy)
    refused(ran, before, shop, "train: training raised", f"late.py:{line}; correct it there")


def test_batches_that_are_empty(shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "none", raising=False)
    (shop.folder / "none.py").write_text("def batches(batch_size, seed):\n    return []\n")
    policy = shop.write_policy(policy_text.replace("shopmodel:batches", "none:batches"))
    before = shop.files()
    refused(loka("probe", policy), before, shop, "the training batches are empty")


def test_a_loss_that_is_not_finite(shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "wild", raising=False)
    (shop.folder / "wild.py").write_text("def loss(output, target):\n    return (output * float('inf')).sum()\n")
    policy = shop.write_policy(policy_text.replace("shopmodel:loss", "wild:loss"))
    before = shop.files()
    refused(loka("probe", policy), before, shop, "the loss is", "at step 1", status=1)


def test_a_model_with_nothing_to_probe(shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "flat", raising=False)
    (shop.folder / "flat.py").write_text(
        "import torch\n\n\nclass Flat(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.shift = torch.nn.Parameter(torch.zeros(13))\n\n    def forward(self, x):\n"
        "        return (x + self.shift).sum(1)\n"
    )
    text = policy_text[: policy_text.index("rules:")].replace("shopmodel:build", "flat:Flat")
    policy = shop.write_policy(text)
    before = shop.files()
    refused(loka("probe", policy), before, shop, f"{policy}:3:", "nothing to probe")


def test_profiles_that_do_not_fit(shop, loka, policy_text):
    assert loka("probe", shop.policy, "--steps", "2").status == 0
    before = shop.files()
    ran = loka("probe", shop.policy, "--from", SUMMARY)
    refused(ran, before, shop, "a summary, without the statistics", "shop.full.safetensors")
    other = policy_text[: policy_text.index("rules:")].replace("shopmodel:build", "shopmodel:many")
    shop.write_policy(other.replace("shopmodel:inputs", "shopmodel:many_inputs"))
    before = shop.files()
    full = "policies/profiles/shop.full.safetensors"
    refused(loka("probe", shop.policy, "--from", full), before, shop, "shopmodel:build", "shopmodel:many", ":3:")
    refused(loka("probe", shop.policy, "--check"), before, shop, "shopmodel:build", "shopmodel:many", ":3:")


def test_a_model_that_changed_shape_is_told_with_both_shapes(shop, loka):
    assert loka("probe", shop.policy, "--steps", "2").status == 0
    path = shop.folder / "shopmodel.py"
    path.write_text(path.read_text(encoding="utf-8").replace("24", "40"), encoding="utf-8")
    sys.modules.pop("shopmodel", None)
    before = shop.files()
    words = ("'layers.0.down'", "K = 32, N = 24", "K = 32, N = 40")
    refused(loka("probe", shop.policy, "--check"), before, shop, *words)
    refused(loka("probe", shop.policy, "--from", "policies/profiles/shop.full.safetensors"), before, shop, *words)


@pytest.mark.parametrize("verb", [["--check"], ["--from", SUMMARY]])
def test_a_profile_that_was_cut_short(verb, shop, loka):
    assert loka("probe", shop.policy, "--steps", "2").status == 0
    path = shop.folder / SUMMARY
    path.write_bytes(path.read_bytes()[:-100])
    before = shop.files()
    refused(loka("probe", shop.policy, *verb), before, shop, SUMMARY)


def test_an_earlier_profile_stays_where_training_fails(shop, loka, policy_text):
    assert loka("probe", shop.policy, "--steps", "2").status == 0
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    path = shop.folder / "shopmodel.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("            x = torch.randn(self", "            assert _ < 5\n            x = torch.randn(self")
    )
    sys.modules.pop("shopmodel", None)
    before = shop.files()
    refused(loka("probe", shop.policy), before, shop, "training raised AssertionError")
    assert profile_file.load_profile(shop.folder / SUMMARY) == profile
