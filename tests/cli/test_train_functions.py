"""Functions of `train` that cannot be used as they are: refused with the place of their field, nothing written."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

HEAD = "import torch\n\n\n"
BATCHES = {
    "def batches(batch_size):\n    return []\n": "seed 0: it is called with the batch size and a seed: batches()",
    "def batches(batch_size, seed):\n    return None\n": "seed 0: it returned None, which is no iterable; yield",
    "def batches(batch_size, seed):\n    return [1]\n": "seed 0, step 1: a batch is 1; each has to be (inputs, target)",
    "def batches(batch_size, seed):\n    return [(1, 2, 3)]\n": "seed 0, step 1: a batch is a tuple of 3; each has to",
    "def batches(batch_size, seed):\n    yield from ()\n": "seed 0: the training batches are empty",
    "def batches(batch_size, seed):\n    raise StopIteration\n    yield\n": (
        "seed 0, step 1: its generator raised StopIteration, at"
    ),
    "class batches:\n    def __init__(self, batch_size, seed): pass\n    def __iter__(self): return 3\n": (
        "seed 0: it returned a batches, which is no iterable; yield (inputs, target)"
    ),
    "def batches(batch_size, seed):\n    return [((torch.ones(batch_size, 13), 3), torch.ones(batch_size))]\n": (
        "seed 0, step 1: forward does not take a batch's inputs: Shop.forward() takes 2 positional arguments but 3 were"
    ),
    "def batches(n, seed):\n    return [((torch.ones(n, 13, device='meta'),), torch.ones(n))]\n": (
        "seed 0, step 1: the inputs cannot be moved to cpu: NotImplementedError: Cannot copy out of meta tensor"
    ),
}
LOSSES = {
    "def loss(output):\n    return output.sum()\n": (
        "seed 0, step 1: it is called with the output and the target: loss() takes 1"
    ),
    "def loss(output, target):\n    return None\n": "seed 0, step 1: it returned None; return a Tensor of one number",
    "def loss(output, target):\n    return output\n": (
        "seed 0, step 1: it returned a Tensor of shape (64,); return a Tensor of one"
    ),
    "def loss(output, target):\n    return output.sum().to(torch.complex64)\n": (
        "seed 0, step 1: it returned a Tensor of torch.complex64; return a real number"
    ),
    "def loss(output, target):\n    found = output.square().sum()\n    found.backward()\n    return found\n": (
        "seed 0, step 1: the graph of its result has been used up; return the loss without calling backward in it"
    ),
    "def loss(output, target):\n    return output.sum().detach()\n": (
        "seed 0, step 1: its result has no gradient; compute it from"
    ),
}


@pytest.fixture
def clumsy(shop, policy_text):
    """The policy with one function of `train` from another module; gives its path and the line that names it."""

    def write(field: str, code: str) -> tuple[str, int]:
        shop.write_module("clumsy", HEAD + code)
        line = next(i for i, text in enumerate(policy_text.split("\n"), 1) if f"shopmodel:{field}" in text)
        return shop.write_policy(policy_text.replace(f"shopmodel:{field}", f"clumsy:{field}")), line

    return write


@pytest.fixture
def refuses(loka, refuse, clumsy):
    def check(field: str, code: str, says: str) -> None:
        policy, line = clumsy(field, code)
        assert loka("generate", policy).status == 0
        for verb in ("probe", "train"):
            err = refuse(verb, policy)
            assert f"{policy}:{line}:" in err
            assert f"train.{field}: {says}" in err

    return check


@pytest.mark.parametrize("code", BATCHES)
def test_batches_that_cannot_be_used(code, refuses):
    refuses("batches", code, BATCHES[code])


@pytest.mark.parametrize("code", LOSSES)
def test_a_loss_that_cannot_be_used(code, refuses):
    refuses("loss", code, LOSSES[code])


def test_a_loss_of_one_number_may_have_a_dimension(loka, clumsy):
    policy, _ = clumsy("loss", "def loss(output, target):\n    return output.square().sum().reshape(1)\n")
    assert loka("generate", policy).status == 0
    for verb, *options in (("train",), ("probe", "--draws", "2", "--ne-batches", "0")):
        ran = loka(verb, policy, *options)
        assert ran.status == 0, ran.err


def test_a_target_that_is_none(loka, refuse, clumsy):
    policy, line = clumsy("batches", "def batches(n, seed):\n    return [((torch.ones(n, 13),), None)]\n")
    assert loka("generate", policy).status == 0
    for verb in ("probe", "train"):
        says = "seed 0, step 1: a target is None; each has to be a Tensor, or hold some"
        assert refuse(verb, policy).startswith(f"{policy}:{line}:12: train.batches: {says}")


def test_batches_of_another_width_are_the_authors(refuse, clumsy):
    """A Probe stands around every function of torch: its frame is passed over."""
    code = "def batches(batch_size, seed):\n    return [((torch.ones(batch_size, 12),), torch.ones(batch_size))]\n"
    policy, _ = clumsy("batches", code)
    err = refuse("probe", policy)
    assert "train: seed 0, step 1: training raised RuntimeError: mat1 and mat2" in err
    assert "shopmodel.py:" in err


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("probe", "{policy}", "--out", ""), "-o: "),
        (("probe", "{policy}", "--out", "."), "-o: "),
        (("probe", "{policy}", "--out", "{policy}"), "-o: "),
        (("report", "{policy}", "-o", "{policy}"), "-o: policies/shop.yaml is a file of the policy"),
        (("generate", "{policy}", "--out", ""), "--out is empty"),
        (("probe", "{policy}", "--seed", str(1 << 70)), ""),
        (("train", "{policy}", "--seed", str(1 << 70)), ""),
    ],
)
def test_options_that_cannot_be_used(arguments, start, shop, refuse):
    assert refuse(*(part.format(policy=shop.policy) for part in arguments)).startswith(start)


def test_a_dict_that_a_forward_of_one_argument_cannot_use_is_the_authors(refuse, clumsy):
    """It is taken as that argument."""
    code = "def batches(batch_size, seed):\n    return [({'y': torch.ones(batch_size, 13)}, torch.ones(batch_size))]\n"
    policy, _ = clumsy("batches", code)
    err = refuse("probe", policy)
    assert "train: seed 0, step 1: training raised TypeError: linear(): argument 'input'" in err
    assert "must be Tensor, not dict, at " in err


def test_a_learning_rate_that_float32_does_not_hold(shop, refuse, policy_text):
    text = policy_text.replace('  loss: "shopmodel:loss"\n', '  loss: "shopmodel:loss"\n  learning_rate: 1.0e+308\n')
    err = refuse("probe", shop.write_policy(text))
    assert "8:18: learning_rate: the number 1.0e+308 is out of range" in err
