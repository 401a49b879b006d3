"""What can be wrong when `loka probe` is called: a message with what to do, the right status, nothing written."""

from __future__ import annotations

import os

import pytest

from loka.probe.profile import profile_file

pytestmark = pytest.mark.slow

SUMMARY = "policies/profiles/shop.safetensors"
FULL = "policies/profiles/shop.full.safetensors"


def told(err, *words):
    for word in words:
        assert word in err, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "0"], ["--every"]),
        (["--steps", "0"], ["--steps"]),
        (["--steps", "3", "--every", "4"], ["--steps is 3 and --every 4", "lower --every"]),
        (["--ne-batches", "1"], ["--ne-batches is 1", "write 2 or more, or 0 for none"]),
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
        (["--check", "--ne-batches", "2"], ["leave out --ne-batches"]),
        (["--from", "x", "--ne-batches", "2"], ["leave out --ne-batches"]),
        (["--draws", "1"], ["--draws"]),
        (["--check"], [f"{SUMMARY}: no such profile", "loka probe"]),
        (["--device", "tpu"], ["--device is 'tpu'"]),
    ],
)
def test_options_that_cannot_be_meant(arguments, words, shop, refuse):
    told(refuse("probe", shop.policy, *arguments), *words)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_known_before_training(shop, refuse):
    (shop.folder / "locked").mkdir(mode=0o500)
    told(refuse("probe", shop.policy, "-o", "locked/x.safetensors"), "no permission in")


FLAT = (
    "import torch\n\n\nclass Flat(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.shift = torch.nn.Parameter(torch.zeros(13))\n\n    def forward(self, x):\n"
    "        return (x + self.shift).sum(1)\n"
)


@pytest.mark.parametrize(
    ("replaced", "by", "code", "status", "words"),
    [
        ("batches", "batches", "def batches(batch_size, seed): return []\n", 2, ["the training batches are empty"]),
        (
            "loss", "loss", "def loss(output, target):\n    return (output * float('inf')).sum()\n", 1,
            ["the loss is", "at step 1"],
        ),
        ("build", "Flat", FLAT, 2, ["policies/shop.yaml:3:", "nothing to probe"]),
    ],
)  # fmt: skip
def test_code_that_gives_nothing_to_learn(replaced, by, code, status, words, shop, refuse, policy_text):
    shop.write_module("mine", code)
    text = policy_text[: policy_text.index("rules:")].replace(f"shopmodel:{replaced}", f"mine:{by}")
    told(refuse("probe", shop.write_policy(text), status=status), *words)


def test_profiles_that_do_not_fit(shop, loka, refuse, policy_text):
    assert loka("probe", shop.policy, "--steps", "2", "--draws", "2", "--ne-batches", "0").status == 0
    told(refuse("probe", shop.policy, "--from", SUMMARY), "a summary, without the statistics", "shop.full.safetensors")
    profile = profile_file.load_profile(shop.folder / SUMMARY)
    shop.edit_model("            x = torch.randn(self", "            assert _ < 5\n            x = torch.randn(self")
    told(refuse("probe", shop.policy), "training raised AssertionError")
    assert profile_file.load_profile(shop.folder / SUMMARY) == profile
    fresh_or_merged = (["--check"], ["--from", FULL])
    shop.edit_model("24", "40")
    for verb in fresh_or_merged:
        err = refuse("probe", shop.policy, *verb)
        told(err, "'layers.0.down'", "K = 32, N = 24", "K = 32, N = 40")
    other = policy_text[: policy_text.index("rules:")].replace("shopmodel:build", "shopmodel:many")
    shop.write_policy(other.replace("shopmodel:inputs", "shopmodel:many_inputs"))
    for verb in fresh_or_merged:
        told(refuse("probe", shop.policy, *verb), "shopmodel:build", "shopmodel:many", ":3:")
    shop.write_policy(policy_text)
    path = shop.folder / SUMMARY
    path.write_bytes(path.read_bytes()[:-100])
    for verb in (["--check"], ["--from", SUMMARY]):
        err = refuse("probe", shop.policy, *verb)
        assert f"{SUMMARY}: " in err
        assert "K = " not in err
