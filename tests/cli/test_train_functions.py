"""Functions of `train` that cannot be used as they are: refused with the place of their field, nothing written."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

HEAD = "import torch\n\n\n"
BATCHES = {
    "def batches(batch_size):\n    return []\n": "it is called with the batch size and a seed: batches() takes 1",
    "def batches(batch_size, seed):\n    return None\n": "it returned None, which is no iterable; yield",
    "def batches(batch_size, seed):\n    return [1]\n": "a batch is 1; each has to be (inputs, target)",
    "def batches(batch_size, seed):\n    return [(1, 2, 3)]\n": "a batch is a tuple of 3; each has to be",
    "def batches(batch_size, seed):\n    yield from ()\n": "the training batches are empty",
    "def batches(batch_size, seed):\n    raise StopIteration\n    yield\n": "its generator raised StopIteration, at",
    "class batches:\n    def __init__(self, batch_size, seed): pass\n    def __iter__(self): return 3\n": (
        "it returned a batches, which is no iterable; yield (inputs, target)"
    ),
    "def batches(batch_size, seed):\n    return [({'y': torch.ones(batch_size, 13)}, torch.ones(batch_size))]\n": (
        "forward does not take a batch's inputs: Shop.forward() got an unexpected keyword argument 'y'"
    ),
    "def batches(n, seed):\n    return [((torch.ones(n, 13, device='meta'),), torch.ones(n))]\n": (
        "the inputs cannot be moved to cpu: NotImplementedError: Cannot copy out of meta tensor"
    ),
}
LOSSES = {
    "def loss(output):\n    return output.sum()\n": "it is called with the output and the target: loss() takes 1",
    "def loss(output, target):\n    return None\n": "it returned None; return a Tensor of one number",
    "def loss(output, target):\n    return output\n": "it returned a Tensor of shape (64,); return a Tensor of one",
    "def loss(output, target):\n    return output.sum().to(torch.complex64)\n": (
        "it returned a Tensor of torch.complex64; return a real number"
    ),
    "def loss(output, target):\n    found = output.square().sum()\n    found.backward()\n    return found\n": (
        "the graph of its result has been used up; return the loss without calling backward in it"
    ),
    "def loss(output, target):\n    return output.sum().detach()\n": "its result has no gradient; compute it from",
}


@pytest.fixture
def refuses(shop, loka, policy_text, monkeypatch):
    def check(field: str, code: str, says: str) -> None:
        monkeypatch.delitem(sys.modules, "clumsy", raising=False)
        (shop.folder / "clumsy.py").write_text(HEAD + code)
        policy = shop.write_policy(policy_text.replace(f"shopmodel:{field}", f"clumsy:{field}"))
        line = next(i for i, text in enumerate(policy_text.split("\n"), 1) if f"shopmodel:{field}" in text)
        for verb in ("probe", "train"):
            if verb == "train":
                assert loka("generate", policy).status == 0
            before = shop.files()
            ran = loka(verb, policy)
            assert ran.status == 2, ran.err
            assert "Traceback" not in ran.err
            assert f"{policy}:{line}:" in ran.err
            assert f"train.{field}: {says}" in ran.err
            assert shop.files() == before

    return check


@pytest.mark.parametrize("code", BATCHES)
def test_batches_that_cannot_be_used(code, refuses):
    refuses("batches", code, BATCHES[code])


@pytest.mark.parametrize("code", LOSSES)
def test_a_loss_that_cannot_be_used(code, refuses):
    refuses("loss", code, LOSSES[code])


@pytest.mark.parametrize("verb", ["probe", "train"])
def test_a_loss_of_one_number_may_have_a_dimension(verb, shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "clumsy", raising=False)
    (shop.folder / "clumsy.py").write_text("def loss(output, target):\n    return output.square().sum().reshape(1)\n")
    policy = shop.write_policy(policy_text.replace("shopmodel:loss", "clumsy:loss"))
    assert loka("generate", policy).status == 0
    ran = loka(verb, policy)
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("verb", ["probe", "train"])
def test_a_target_that_is_none(verb, shop, loka, policy_text, monkeypatch):
    monkeypatch.delitem(sys.modules, "clumsy", raising=False)
    code = "def batches(batch_size, seed):\n    return [((torch.ones(batch_size, 13),), None)]\n"
    (shop.folder / "clumsy.py").write_text(HEAD + code)
    policy = shop.write_policy(policy_text.replace("shopmodel:batches", "clumsy:batches"))
    assert loka("generate", policy).status == 0
    ran = loka(verb, policy)
    assert ran.status == 2
    assert f"{policy}:5:12: train.batches: " in ran.err
    assert "None" in ran.err


def test_batches_of_another_width_are_the_authors(shop, loka, policy_text, monkeypatch):
    """A Probe stands around every function of torch: its frame is passed over."""
    monkeypatch.delitem(sys.modules, "clumsy", raising=False)
    code = "def batches(batch_size, seed):\n    return [((torch.ones(batch_size, 12),), torch.ones(batch_size))]\n"
    (shop.folder / "clumsy.py").write_text(HEAD + code)
    policy = shop.write_policy(policy_text.replace("shopmodel:batches", "clumsy:batches"))
    ran = loka("probe", policy)
    assert ran.status == 2, ran.err
    assert "train: training raised RuntimeError: mat1 and mat2" in ran.err
    assert "shopmodel.py:" in ran.err


@pytest.mark.parametrize("out", ["", ".", "{policy}"])
def test_a_profile_needs_a_place_of_its_own(out, shop, loka):
    before = shop.files()
    ran = loka("probe", shop.policy, "--out", out.format(policy=shop.policy))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("-o: ")
    assert shop.files() == before


def test_a_report_does_not_replace_its_policy(shop, loka):
    before = shop.files()
    ran = loka("report", shop.policy, "-o", shop.policy)
    assert ran.status == 2
    assert ran.err.startswith(f"-o: {shop.policy} is a file of the policy")
    assert shop.files() == before


def test_a_package_is_not_written_to_a_folder_without_a_name(shop, loka):
    before = shop.files()
    ran = loka("generate", shop.policy, "--out", "")
    assert ran.status == 2
    assert ran.err.startswith("--out is empty")
    assert shop.files() == before


@pytest.mark.parametrize("verb", ["probe", "train"])
def test_a_seed_that_torch_does_not_take(verb, shop, loka):
    assert loka(verb, shop.policy, "--seed", str(1 << 70)).status == 2


def test_a_learning_rate_that_float32_does_not_hold(shop, loka, policy_text):
    text = policy_text.replace('  loss: "shopmodel:loss"\n', '  loss: "shopmodel:loss"\n  learning_rate: 1.0e+308\n')
    ran = loka("probe", shop.write_policy(text))
    assert ran.status == 2
    assert "8:18: learning_rate: the number 1.0e+308 is out of range" in ran.err
