"""A model of two heads on the command line: its batch is a dict, its output and its target hold a head each."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

MODEL = """\
import shopmodel
import torch


class Heads(shopmodel.Shop):
    def __init__(self):
        super().__init__()
        self.buy = torch.nn.Linear(13, 1)

    def forward(self, batch):
        x = torch.cat([batch["user"], batch["item"]], 1)
        return {"click": super().forward(x), "buy": self.buy(x).squeeze(-1)}


def inputs(batch_size):
    return {"user": torch.randn(batch_size, 6), "item": torch.randn(batch_size, 7)}


def held(batches):
    for (x,), click in batches:
        yield {"user": x[:, :6], "item": x[:, 6:]}, {"click": click, "buy": (x[:, 8] > 0.3).float()}


def batches(batch_size, seed):
    return held(shopmodel.batches(batch_size, seed))


def test_batches(batch_size, seed):
    return held(shopmodel.test_batches(batch_size, seed))


def loss(output, target):
    return sum(shopmodel.loss(output[head], target[head]) for head in ("click", "buy"))
"""


@pytest.fixture
def heads(shop, policy_text):
    """The policy of the model; it names its heads."""
    shop.write_module("heads", MODEL)
    text = policy_text.replace("shopmodel:build", "heads:Heads").replace("shopmodel:", "heads:")
    return shop.write_policy(text.replace("train:\n", "train:\n  heads: [click, buy]\n"))


def test_each_head_in_train_compare_report_and_probe(heads, shop, loka):
    assert loka("generate", heads).status == 0
    ran = loka("train", heads, "--steps", "2")
    assert ran.status == 0, ran.err
    rows = [line.split()[:2] for line in ran.out.splitlines() if line.startswith(("NE", "AUC"))]
    assert rows == [["NE", "click"], ["AUC", "click"], ["NE", "buy"], ["AUC", "buy"]]
    data = json.loads(loka("train", heads, "--steps", "2", "--json").out)
    assert list(data["fp8"]["heads"]) == ["click", "buy"]
    assert set(data["fp8"]["heads"]["buy"]) == {"ne", "auc", "log_loss"}
    assert data["fp8"]["ne"] == pytest.approx(sum(each["ne"] for each in data["fp8"]["heads"].values()) / 2)

    short = (heads, "--steps", "2", "--device", "cpu", "--seeds", "2", "--draws", "1", "--budget", "1000")
    ran = loka("compare", *short)
    assert ran.status == 0, ran.err
    assert [line.split()[:2] for line in ran.out.splitlines()[2:6]] == [
        ["click", "1000"], ["click", "1001"], ["buy", "1000"], ["buy", "1001"],
    ]  # fmt: skip
    for head in ("click", "buy"):
        assert f"NE of head {head} of FP8 against the model as it is, 2 seeds: " in ran.out
    assert "All 2 heads: parity" in ran.out
    data = json.loads(loka("compare", *short, "--json").out)
    found = data["heads"]
    assert {name: each["verdict"] for name, each in found.items()} == {"click": "parity", "buy": "parity"}
    assert data["mean_percent"] == max(each["mean_percent"] for each in found.values())

    assert loka("report", heads, "-o", "page.html").status == 0
    page = (shop.folder / "page.html").read_text()
    assert page.count("Change of NE of head click</b>") == page.count("Change of NE of head buy</b>") == 2

    ran = loka("probe", heads, "--steps", "2", "--draws", "2")
    assert ran.status == 0, ran.err
    assert "the profile has no changes of NE" not in ran.err
    assert loka("probe", heads, "--synthetic", "--steps", "2", "--draws", "2").status == 0


def test_without_heads_in_the_policy_the_model_is_refused_before_a_step(heads, shop, refuse, loka, policy_text):
    text = (shop.folder / heads).read_text()
    shop.write_policy(text.replace("  heads: [click, buy]\n", ""))
    assert loka("generate", heads).status == 0  # no plan depends on it
    err = refuse("train", heads)
    assert "train.test: seed 0, batch 1: in evaluation mode the model must return one logit" in err
    assert "not a dict of click: (256,), buy: (256,) for a target of a dict of " in err


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[click, click]", "heads: 'click' is there twice; name each once"),
        ("[-1]", "heads: -1 names no head; write a key of the model's output, or its place, counted from 0"),
        ("[true]", "heads: True names no head"),
        ("[]", "heads: empty; give at least one, or remove the key"),
    ],
)
def test_wrong_heads_have_a_place(heads, shop, refuse, written, said):
    text = (shop.folder / heads).read_text()
    shop.write_policy(text.replace("[click, buy]", written))
    err = refuse("validate", heads)
    assert err.startswith("policies/shop.yaml:5:1")
    assert said in err


def test_other_batches_in_the_second_run_are_an_error_with_a_place(shop, loka, refuse, policy_text):
    shop.write_module(
        "drawn",
        "import torch\nimport shopmodel\n\n\ndef batches(batch_size, seed):\n    for _ in range(4):\n"
        "        x = torch.randn(batch_size, 13, generator=torch.Generator().manual_seed(Calls.drawn))\n"
        "        Calls.drawn += 1\n        yield (x,), (x[:, 0] > 0).float()\n\n\nclass Calls:\n    drawn = 0\n",
    )
    policy = shop.write_policy(policy_text.replace("shopmodel:batches", "drawn:batches"))
    assert loka("generate", policy).status == 0
    for verb in (("train",), ("compare", "--seeds", "2", "--draws", "1")):
        err = refuse(*verb, policy)
        assert "policies/shop.yaml:5:12: train.batches: seed " in err
        assert ", patched: the two runs of this pair saw different batches, at step 1 first" in err
