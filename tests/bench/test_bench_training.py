"""The training loop: it learns, is paired, averages weights, and says where a loss stopped being finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from loka.bench.quality.evaluation import predict
from loka.bench.quality.heads import ONLY
from loka.bench.quality.training import NonFiniteLossError, build, train, train_pair
from loka.bench.quality.training_job import TrainingJob
from loka.bench.quality.training_state import WeightAverage
from loka.errors import InputError
from loka.policy.policy_schema import Optimizer


@pytest.mark.parametrize("optimizer", [each.value for each in Optimizer])
def test_training_learns(job: TrainingJob, optimizer: str) -> None:
    job = replace(job, optimizer=optimizer, learning_rate={"adam": 5e-2, "adagrad": 1e-1, "sgd": 0.5}[optimizer])
    result = train(build(job, 0), job, seed=0)
    assert result.ne < 0.9
    assert result.auc > 0.75
    assert result.train_loss[-1] < result.train_loss[0]
    assert result.samples_per_second > 0


@pytest.mark.parametrize(("batch_size", "steps"), [(64, 16), (333, 4), (999, 2), (5000, 1)])
def test_odd_last_batches_are_trained_on(job: TrainingJob, batch_size: int, steps: int) -> None:
    result = train(build(job, 0), replace(job, batch_size=batch_size), seed=0)
    assert (result.steps, result.samples) == (steps, 1000)


def test_progress_ends_at_all_samples(job: TrainingJob) -> None:
    seen: list[tuple[int, int | None]] = []
    train(build(job, 0), replace(job, batch_size=300), 0, lambda done, total: seen.append((done, total)))
    assert seen == [(300, 1000), (600, 1000), (900, 1000), (1000, 1000)]


def test_steps_limit_the_run(job: TrainingJob) -> None:
    totals: list[int | None] = []
    result = train(build(job, 0), replace(job, steps=3), 0, lambda _, total: totals.append(total))
    assert (result.steps, result.samples, totals) == (3, 192, [192, 192, 192])


def test_batches_of_unknown_length_have_no_total(job: TrainingJob) -> None:
    def stream(batch_size: int, seed: int):  # type: ignore[no-untyped-def]
        yield from job.batches(batch_size, seed)

    totals: set[int | None] = set()
    train(build(job, 0), replace(job, batches=stream), 0, lambda _, total: totals.add(total))
    assert totals == {None}


def test_a_run_repeats_exactly_and_leaves_the_callers_generator_alone(job: TrainingJob) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second = (train(build(job, 7), job, 7) for _ in range(2))
    assert (first.ne, first.train_loss) == (second.ne, second.train_loss)
    assert torch.equal(torch.get_rng_state(), before)
    assert train(build(job, 8), job, 8).ne != first.ne


def test_a_pair_starts_from_the_same_weights_though_the_factory_draws_new_ones(job: TrainingJob) -> None:
    calls = []

    def restless() -> nn.Module:
        calls.append(1)
        torch.manual_seed(len(calls))
        return job.factory()

    seen: list[Tensor] = []
    pair = train_pair(replace(job, factory=restless), lambda model: seen.append(next(model.parameters()).clone()), 0)
    torch.manual_seed(1)
    assert torch.equal(seen[0], next(job.factory().parameters()))
    assert pair.as_is.train_loss == pair.patched.train_loss


def test_the_patch_is_checked_after_training_and_progress_is_labelled(job: TrainingJob) -> None:
    order: list[object] = []

    def progress(label: str, done: int, total: int | None) -> None:
        if not order or order[-1] != label:
            order.append(label)

    def patch(model: nn.Module) -> str:
        order.append("patch")
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        return "handle"

    pair = train_pair(job, patch, 0, progress, order.append)
    assert order == ["as it is", "patch", "patched", "handle"]
    assert pair.ne_difference_percent != 0


@pytest.mark.parametrize("optimizer", [each.value for each in Optimizer])
def test_from_shared_steps_a_run_goes_on_as_if_it_had_not_stopped(job: TrainingJob, optimizer: str) -> None:
    """Dropout draws the same, too, and the average goes on."""
    job = replace(job, optimizer=optimizer)
    alone = train(build(job, 3), job, 3)
    pair = train_pair(replace(job, shared_steps=5), lambda model: None, 3)
    for run in (pair.as_is, pair.patched):
        assert (run.train_loss, run.ne) == (alone.train_loss, alone.ne)
        assert (run.steps, run.samples) == (16, 1000)


def test_shared_steps_are_trained_once_and_unpatched(job: TrainingJob) -> None:
    calls: list[str] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label = job.factory(), "as it is"

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                calls.append(self.label)
            return self.body(x) * (0.0 if self.label == "patched" else 1.0)

    def patch(model: nn.Module) -> None:
        model.label = "patched"  # type: ignore[assignment]

    pair = train_pair(replace(job, factory=Counted, shared_steps=10), patch, 0)
    assert calls == ["as it is"] * 16 + ["patched"] * 6
    assert pair.as_is.train_loss[:6] == pair.patched.train_loss[:6]  # the curve has a point for each tenth
    assert pair.as_is.train_loss[7] != pair.patched.train_loss[7]


def test_the_rate_is_that_of_the_steps_after_the_shared_ones(job: TrainingJob) -> None:
    pair = train_pair(replace(job, shared_steps=15), lambda model: None, 0)
    for run in (pair.as_is, pair.patched):
        assert run.samples_per_second * run.seconds == pytest.approx(1000 - 15 * 64)


def test_shared_steps_leave_something_to_train(job: TrainingJob) -> None:
    with pytest.raises(InputError, match="there are 5 steps, and both runs share the first 5"):
        replace(job, steps=5, shared_steps=5)
    with pytest.raises(
        InputError, match=r"train.batches: seed 0: the training batches end after 16 steps, and both .* 16: yield"
    ):
        train_pair(replace(job, shared_steps=16), lambda model: None, 0)


def test_a_factory_that_changes_its_shapes_is_refused(job: TrainingJob) -> None:
    sizes = iter((4, 5))

    def changing() -> nn.Module:
        width = next(sizes)
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1), nn.Flatten(0))

    with pytest.raises(InputError, match="two calls of the factory"):
        train_pair(replace(job, factory=changing), lambda model: None, 0)


@pytest.mark.parametrize("bad_step", [1, 5, 16])
def test_the_first_step_without_a_finite_loss_is_named(job: TrainingJob, bad_step: int) -> None:
    step = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        step[0] += 1
        value = nn.functional.binary_cross_entropy_with_logits(output, target)
        return value * float("inf") if step[0] >= bad_step else value

    with pytest.raises(NonFiniteLossError, match=f"at step {bad_step},") as caught:
        train(build(job, 0), replace(job, loss=loss), 0)
    assert caught.value.step == bad_step
    assert caught.value.exit_status == 1


def test_the_average_is_the_weighted_mean_of_all_steps() -> None:
    model = nn.Linear(3, 2)
    average, decay = WeightAverage(model, 0.8), 0.8
    history = []
    for step in range(5):
        with torch.no_grad():
            model.weight.copy_(torch.full_like(model.weight, float(step * step)))
        average.update()
        history.append(float(step * step))
    own = model.weight.detach().clone()
    shares = [decay ** (4 - i) for i in range(5)]
    expected = sum(s * h for s, h in zip(shares, history, strict=True)) / sum(shares)
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), torch.full_like(own, expected))
    assert torch.equal(model.weight, own)


def test_decay_zero_evaluates_the_last_weights(job: TrainingJob) -> None:
    job = replace(job, ema=0)
    model = build(job, 0)
    result = train(model, job, 0)
    logits, target = predict(model, job.test_batches(100, 0), "cpu")[ONLY]
    loss = float(nn.functional.binary_cross_entropy_with_logits(logits.double(), target.double()))
    assert result.log_loss == pytest.approx(loss, rel=1e-6)


def test_prediction_does_not_depend_on_the_batch_size_nor_change_the_mode(job: TrainingJob) -> None:
    model = build(job, 0)
    assert model.training
    whole, _ = predict(model, job.test_batches(1000, 0), "cpu")[ONLY]
    odd, _ = predict(model, job.test_batches(7, 0), "cpu")[ONLY]
    torch.testing.assert_close(odd, whole)
    assert model.training


def test_inputs_may_be_keywords(job: TrainingJob) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, *, x: Tensor) -> Tensor:
            logits: Tensor = self.linear(x)
            return logits.squeeze(1)

    def named(batches):  # type: ignore[no-untyped-def]
        return lambda size, seed: (({"x": x}, target) for (x,), target in batches(size, seed))

    job = replace(job, factory=Named, batches=named(job.batches), test_batches=named(job.test_batches))
    assert train(build(job, 0), job, 0).ne < 0.95


def test_warm_up_raises_the_rate_linearly(job: TrainingJob) -> None:
    rates = [replace(job, learning_rate=1.0, warmup=3).rate(step) for step in (1, 2, 3, 4, 100)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_empty_batches_and_a_wrong_output_are_refused(job: TrainingJob) -> None:
    with pytest.raises(InputError, match="training batches are empty"):
        train(build(job, 0), replace(job, batches=lambda size, seed: []), 0)
    with pytest.raises(InputError, match="test batches are empty"):
        train(build(job, 0), replace(job, test_batches=lambda size, seed: []), 0)
    with pytest.raises(InputError, match="one logit for each sample"):
        predict(nn.Linear(8, 2), job.batches(10, 0), "cpu")
    with pytest.raises(InputError, match="no parameter that trains"):
        train(nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(0)), job, 0)


class TwoHeads(nn.Module):
    """Two logits for each sample in training; in evaluation both, or the first alone."""

    def __init__(self, one_evaluated: bool) -> None:
        super().__init__()
        self.heads, self.one_evaluated = nn.Linear(8, 2), one_evaluated

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        first, second = self.heads(x).unbind(1)
        return first if self.one_evaluated and not self.training else (first, second)


def test_a_model_of_two_heads_trains_where_it_evaluates_one(job: TrainingJob) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(torch.stack(output, 1), target)

    def labels(size: int, seed: int):  # type: ignore[no-untyped-def]
        return ((inputs, torch.stack((click, 1 - click), 1)) for inputs, click in job.batches(size, seed))

    made = replace(job, factory=lambda: TwoHeads(True), batches=labels, loss=loss)
    assert train_pair(made, lambda model: None, 0).as_is.ne < 0.95


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_holds_in_training_and_in_evaluation(job: TrainingJob, autocast: bool) -> None:
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    make = job.factory

    def watched() -> nn.Module:
        model = make()
        linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
        linear.register_forward_hook(lambda module, _, output: seen[module.training].add(output.dtype))
        return model

    job = replace(job, factory=watched, steps=2, autocast=autocast)
    train(build(job, 0), job, 0)
    dtype = torch.bfloat16 if autocast else torch.float32
    assert seen == {True: {dtype}, False: {dtype}}
