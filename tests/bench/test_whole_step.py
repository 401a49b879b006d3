"""A whole step on the CPU: what it computes, and what its optimisers are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.bench.model.whole_step import (
    Example,
    StepSample,
    StepSettings,
    WholeStep,
    in_float32,
    optimizers_of,
    sample_of,
    synthetic_loss,
)
from loka.errors import InputError
from loka.model.build_model import BuiltModel, build_model
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy

TRAINING = StepSettings(training=True, dtype=torch.float32, autocast=False, marks=False, device="cpu")
SETTINGS = [TRAINING, replace(TRAINING, autocast=True), replace(TRAINING, dtype=torch.bfloat16)]
MODELS = "tests.support.models.ablation_model"
POLICY = f"""\
version: 1
name: clicks
model: {{factory: "{MODELS}:build", inputs: "{MODELS}:inputs", batch_size: 8}}
"""
TRAIN = f'train: {{batches: "{MODELS}:batches", loss: "{MODELS}:loss", optimizer: sgd, learning_rate: 0.5}}\n'


def policy_of(folder: Path, text: str = POLICY + TRAIN) -> Policy:
    (folder / "clicks.yaml").write_text(text)
    return load_policy(folder / "clicks.yaml")


def built(policy: Policy) -> BuiltModel:
    return build_model(policy.model.factory, policy.model.inputs, policy.model.batch_size)


class Tables(nn.Module):
    """Two tables, one with sparse gradients, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.dense = nn.Embedding(50, 4)
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        logits = self.linear(self.sparse(ids) + self.dense(ids).sum(1))
        return {"logits": logits, "ids": [ids]}


IDS = torch.arange(12).reshape(4, 3)
EXAMPLE = Example((torch.ones(2, 2, requires_grad=True),), {"ids": torch.tensor([1, 1])})


@pytest.mark.parametrize("settings", SETTINGS, ids=["float32", "autocast", "bfloat16"])
def test_steps_train_the_model_they_are_given(settings: StepSettings) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(settings.dtype)
    x = torch.randn(32, 16, requires_grad=True)
    sample = StepSample(Example((x,), {}), 32, x[:, :1].detach(), nn.functional.mse_loss, "adam", 1e-2)
    step = WholeStep(model, model, sample, settings)
    losses = [float(step()[0]) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    assert x.grad is None, "the example itself is left alone"
    assert all(value.dtype is settings.dtype for value in model.parameters())


def test_a_step_is_what_a_loop_would_do() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    other.load_state_dict(model.state_dict())
    x, target = torch.randn(8, 4), torch.randn(8, 1)
    step = WholeStep(
        model, model, StepSample(Example((x,), {}), 8, target, nn.functional.mse_loss, "sgd", 0.1), TRAINING
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        (loss,) = step()
        optimizer.zero_grad()
        expected = nn.functional.mse_loss(other(x), target)
        expected.backward()
        optimizer.step()
        assert float(loss) == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(model.weight, other.weight)


def test_inference_returns_the_outputs_without_gradients() -> None:
    model = Tables().eval()
    step = WholeStep(model, model, StepSample(Example((IDS,), {}), 4), replace(TRAINING, training=False))
    logits, ids = step()
    assert not logits.requires_grad
    assert ids.tolist() == IDS.tolist()


def test_sparse_gradients_have_an_optimiser_that_takes_them() -> None:
    model = Tables()
    step = WholeStep(model, model, StepSample(Example((IDS,), {}), 4), TRAINING)
    before = [value.detach().clone() for value in model.parameters()]
    step()
    assert all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    dense, sparse = optimizers_of(model, StepSample(Example((), {}), 4), "cpu")
    assert isinstance(dense, torch.optim.Adam)
    assert isinstance(sparse, torch.optim.SGD)
    assert [value is model.sparse.weight for value in sparse.param_groups[0]["params"]] == [True]
    assert dense.defaults["fused"] is True
    assert not dense.defaults["capturable"]


def test_the_synthetic_loss_is_of_what_depends_on_parameters() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = synthetic_loss({"a": (x.bfloat16(), torch.ones(2)), "b": [2 * x]})
    assert loss.detach().item() == 5.0 + 20.0
    with pytest.raises(InputError, match="no training step to measure"):
        synthetic_loss((torch.ones(2),))


def test_losses_see_float32_outputs_of_a_model_in_bfloat16() -> None:
    ids = torch.tensor([1])
    found = in_float32({"a": torch.ones(1, dtype=torch.bfloat16), "b": (ids, "text")})
    assert found["a"].dtype is torch.float32
    assert found["b"] == (ids, "text")


def test_training_reads_the_policys_batches_and_inference_its_inputs(tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    trained, served = (sample_of(policy, built(policy), training) for training in (True, False))
    assert trained.example.kwargs["x"].shape == (8, 32)
    assert not trained.example.kwargs["x"].requires_grad
    assert trained.target is not None
    assert (trained.optimizer, trained.learning_rate) == ("sgd", 0.5)
    assert trained.words == "the policy's loss, sgd"
    assert served.example.kwargs["x"].requires_grad
    assert served.policy_loss is None


def test_batches_that_are_too_small_are_refused_with_the_size_to_take(tmp_path: Path) -> None:
    (tmp_path / "short_batches.py").write_text(
        "import torch\ndef batches(size, seed):\n    yield torch.ones(3, 2), torch.ones(3)\n"
    )
    policy = policy_of(tmp_path, POLICY + TRAIN.replace(f"{MODELS}:batches", "short_batches:batches"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(InputError, match="a batch of 8 has 3 rows; measure at that size: --batch 3"):
            sample_of(policy, built(policy), training=True)


def test_inputs_are_copied_in_the_dtype_and_ask_for_a_gradient_where_the_original_does() -> None:
    made = EXAMPLE.fresh("cpu", torch.bfloat16, training=True)
    assert made.args[0].dtype is torch.bfloat16
    assert made.args[0].is_leaf
    assert made.kwargs["ids"].dtype is torch.int64
    assert made.leaves == [made.args[0]]
    assert EXAMPLE.fresh("cpu", torch.float32, training=False).leaves == []
    plain = Example((torch.ones(2), [torch.ones(1), "text"]), {})
    assert plain.fresh("cpu", torch.float32, training=True).leaves == []
    assert plain.fresh("cpu", torch.float32, training=True).args[1][1] == "text"


DICTS = """\
import torch


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.Linear(4, 2)

    def forward(self, batch):
        click, buy = self.heads(batch["x"]).unbind(1)
        return {"click": click, "buy": buy}


def batches(batch_size, seed):
    yield {"x": torch.ones(batch_size, 4)}, {"click": torch.ones(batch_size), "buy": torch.zeros(batch_size)}


def loss(output, target):
    return sum((output[head] - target[head]).square().mean() for head in target)
"""


def test_a_batch_may_be_the_dict_that_forward_takes_and_its_target_hold_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole_step_dicts.py").write_text(DICTS)
    monkeypatch.chdir(tmp_path)
    named = 'model: {factory: "whole_step_dicts:Two", batch_size: 8}\n'
    train = 'train: {batches: "whole_step_dicts:batches", loss: "whole_step_dicts:loss"}\n'
    policy = policy_of(tmp_path, f"version: 1\nname: two\n{named}{train}")
    built = build_model("whole_step_dicts:Two", None, 8, batches="whole_step_dicts:batches")
    sample = sample_of(policy, built, training=True)
    (batch,) = sample.example.args
    assert (list(batch), sample.example.kwargs, list(sample.target)) == (["x"], {}, ["click", "buy"])
    with torch.no_grad():
        click, buy = built.module(batch).values()
        expected = float((click - 1).square().mean() + buy.square().mean())
    (loss,) = WholeStep(built.module, built.module, sample, TRAINING)()
    assert float(loss) == pytest.approx(expected)
