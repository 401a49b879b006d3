"""Models of several heads: NE and AUC of each, a verdict over those that the policy names, in whatever holds them."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.bench.quality.compare_quality import Judgement, QualityVerdict, bounds, compare, looks, pairs_needed
from loka.bench.quality.evaluation import Metrics, auc, held_out_of, log_loss, normalised_entropy
from loka.bench.quality.pair_file import PairFile, RunFacts
from loka.bench.quality.training import PairResult, TrainResult, build, train_pair
from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError
from loka.model.inputs import arguments, to_device
from loka.probe.sensitivity import loss_change
from tests.bench.conftest import FEATURES

Named = namedtuple("Named", "click buy")


@dataclasses.dataclass
class Both:
    click: Tensor
    buy: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    click: Tensor
    buy: Tensor


class Plain:
    def __init__(self, click: Tensor, buy: Tensor) -> None:
        self.click, self.buy = click, buy


HOLDERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str | int, ...]]] = {
    "dict": (lambda click, buy: {"click": click, "buy": buy}, ("click", "buy")),
    "nested": (lambda click, buy: {"aux": [{"x": click * 2}], "click": click, "buy": buy}, ("click", "buy")),
    "ordered": (lambda click, buy: OrderedDict(click=click, buy=buy), ("click", "buy")),
    "named tuple": (Named, ("click", "buy")),
    "named tuple by place": (Named, (0, 1)),
    "dataclass": (Both, ("click", "buy")),
    "slots": (Slots, ("click", "buy")),
    "object": (Plain, ("click", "buy")),
    "tuple": (lambda click, buy: (click, buy), (0, 1)),
    "columns": (lambda click, buy: torch.stack([click, buy], 1), (0, 1)),
}


def two_of(value: Any, heads: tuple[str | int, ...]) -> list[Tensor]:
    """Both heads, read as an author would."""
    if isinstance(value, Tensor):
        return [value[:, 0], value[:, 1]]
    if isinstance(value, dict):
        return [value["click"], value["buy"]]
    return list(value) if isinstance(value, tuple) else [value.click, value.buy]


class TwoHeads(nn.Module):
    """Takes the batch, a dict, as its one argument."""

    def __init__(self, hold: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.heads, self.hold = nn.Linear(FEATURES, 2), hold

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.hold(*self.heads(torch.cat([batch["user"], batch["item"]], 1)).unbind(1))


def job_of(job: TrainingJob, holder: str) -> TrainingJob:
    """A job of two heads, output and target held alike."""
    hold, heads = HOLDERS[holder]

    def batches(made: Callable[[int, int], Any]) -> Callable[[int, int], Iterator[Any]]:
        def each(size: int, seed: int) -> Iterator[Any]:
            for (x,), click in made(size, seed):
                yield {"user": x[:, :3], "item": x[:, 3:]}, hold(click, (x[:, 2] > 0.5).float())

        return each

    def loss(output: Any, target: Any) -> Tensor:
        both = zip(two_of(output, heads), two_of(target, heads), strict=True)
        return sum((nn.functional.binary_cross_entropy_with_logits(*each) for each in both), torch.zeros(()))

    return replace(
        job,
        factory=lambda: TwoHeads(hold),
        batches=batches(job.batches),
        test_batches=batches(job.test_batches),
        loss=loss,
        heads=heads,
    )


@pytest.mark.parametrize("holder", HOLDERS)
def test_each_head_has_its_own_figures_whatever_holds_it(job: TrainingJob, holder: str) -> None:
    made = job_of(job, holder)
    models: list[nn.Module] = []
    pair = train_pair(replace(made, ema=0), models.append, 3)
    assert pair.heads == tuple(map(str, made.heads))
    assert pair.patched == replace(
        pair.as_is, seconds=pair.patched.seconds, samples_per_second=pair.patched.samples_per_second
    )
    ((inputs, target),) = made.test_batches(1000, 3)
    with torch.no_grad():
        outputs = two_of(models[0].eval()(inputs), made.heads)
    for name, logits, labels in zip(pair.heads, outputs, two_of(target, made.heads), strict=True):
        expected = Metrics(normalised_entropy(logits, labels), auc(logits, labels), log_loss(logits, labels))
        assert pair.patched.heads[name] == expected
        assert (pair.of_head(name).patched.ne, pair.of_head(name).heads) == (expected.ne, ("",))
    assert pair.as_is.ne == pytest.approx(sum(each.ne for each in pair.as_is.heads.values()) / 2)


@pytest.mark.parametrize("holder", ["dict", "slots", "tuple", "columns"])
def test_a_probe_measures_what_errors_cost_the_head_that_they_hurt_most(job: TrainingJob, holder: str) -> None:
    """The same numbers for each holder as for a single output of the head alone."""
    made = replace(job_of(job, holder), test_batch_size=400)
    held_out = held_out_of(made, build(made, 0), (), 0, 2)
    inputs, target = held_out.batches[0]
    with torch.no_grad():
        output = held_out.run(inputs)
    click, buy = two_of(output, made.heads)
    error = torch.linspace(-0.1, 0.2, len(click))
    changed = HOLDERS[holder][0](click, buy + error)
    of_click, of_buy = (loss_change(loss, output, changed, target) for loss in held_out.head_losses)
    alone = loss_change(nn.functional.binary_cross_entropy_with_logits, buy, buy + error, two_of(target, made.heads)[1])
    assert (of_click.varying, of_click.even, of_click.odd) == (0, 0, 0)
    assert dataclasses.astuple(of_buy) == pytest.approx(dataclasses.astuple(alone), rel=1e-6)
    whole = loss_change(held_out.loss, output, changed, target)
    assert 0 < whole.even < of_buy.even  # the other head's loss is in its denominator


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (("click", "bay"), "train.heads names 'bay', and the output has no such head: it is a dict of click: "),
        ((0,), "train.heads names 0, and the output has no such head"),
        ((), "batches one label, not a dict of .* name the heads of a model .*, train: {heads: \\[click, buy\\]}"),
    ],
)
def test_heads_that_are_not_there_are_refused_before_any_step(
    job: TrainingJob, heads: tuple[str | int, ...], says: str
) -> None:
    made = replace(job_of(job, "dict"), heads=heads, loss=lambda output, target: pytest.fail("trained"))
    with pytest.raises(InputError, match=rf"train.test: seed 0, batch 1: .*{says}"):
        train_pair(made, lambda model: None, 0)


def test_columns_have_no_heads_by_name(job: TrainingJob) -> None:
    with pytest.raises(InputError, match=r"names 'data', and the output has no such head: it is \(1000, 2\)"):
        train_pair(replace(job_of(job, "columns"), heads=("data",)), lambda model: None, 0)


def test_labels_that_no_metric_takes_name_their_head(job: TrainingJob) -> None:
    made = job_of(job, "dict")
    ones = replace(made, test_batches=lambda size, seed: [
        (inputs, target | {"buy": torch.ones_like(target["buy"])}) for inputs, target in made.test_batches(size, seed)
    ])  # fmt: skip
    with pytest.raises(InputError, match=r"train.test: seed 0: head buy: normalised entropy needs clicks and non-cl"):
        train_pair(ones, lambda model: None, 0)


def test_a_head_of_another_quantity_is_refused_before_any_step(job: TrainingJob) -> None:
    made = replace(job_of(job, "dict"), loss=lambda output, target: pytest.fail("trained"))
    minutes = replace(made, test_batches=lambda size, seed: [
        (inputs, target | {"buy": 2.5 * target["buy"]}) for inputs, target in made.test_batches(size, seed)
    ])  # fmt: skip
    with pytest.raises(InputError, match=r"batch 1: head buy: its labels must be 0 .* leave a head that predicts ano"):
        train_pair(minutes, lambda model: None, 0)


BASE = TrainResult(0.8, 0.75, 0.5, 1.0, 1, 1, 1.0, (0.5,))


def pairs(**percent: list[float]) -> tuple[PairResult, ...]:
    """Pairs whose NE differs by so many percent in each head."""

    def run(differences: dict[str, float]) -> TrainResult:
        return replace(BASE, heads={head: Metrics(0.8 * (1 + p / 100), 0.75, 0.5) for head, p in differences.items()})

    seeds = [dict(zip(percent, each, strict=True)) for each in zip(*percent.values(), strict=True)]
    return tuple(PairResult(seed, run(dict.fromkeys(percent, 0.0)), run(each), "") for seed, each in enumerate(seeds))


GOOD, BAD, WIDE = [0.0, 0.001, -0.001, 0.0], [0.3, 0.31, 0.29, 0.3], [0.5, -0.5, 0.6, -0.6]


@pytest.mark.parametrize(
    ("second", "verdict"),
    [(GOOD, QualityVerdict.PARITY), (BAD, QualityVerdict.LOST), (WIDE, QualityVerdict.UNDECIDED)],
)
def test_the_verdict_is_over_all_heads(second: list[float], verdict: QualityVerdict) -> None:
    found = Judgement.of(pairs(click=GOOD, buy=second), planned=4)
    assert found.verdict is verdict
    assert [head.head for head in found.heads] == ["click", "buy"]
    assert found.heads[0].verdict is QualityVerdict.PARITY
    assert found.worst.head == max(found.heads, key=lambda head: head.mean).head
    assert found.heads[1].differences == pytest.approx(second)


def test_a_loss_that_is_sure_of_one_head_alone_has_its_part_of_the_error_rate() -> None:
    """The 5 % of a wrong loss are those of all heads together; parity needs no part, since each head has to keep it."""
    differences, budget = [0.03, 0.05, 0.02, 0.06, 0.04], 0.0
    (_, error), *_ = looks(5)[-1:]
    low, high = bounds(differences, error)[0], bounds(differences, error / 4)[0]
    budget = (low + high) / 2  # sure by the whole rate, and not by a quarter of it
    alone, of_four = (
        Judgement.of(pairs(**{str(number): differences for number in range(heads)}), 5, budget) for heads in (1, 4)
    )
    assert (alone.verdict, of_four.verdict) == (QualityVerdict.LOST, QualityVerdict.UNDECIDED)
    assert of_four.seeds_needed == pairs_needed(differences, budget, 4)
    needed = [pairs_needed(differences, 0.035, heads) or 0 for heads in (1, 4)]
    assert 0 < needed[0] < needed[1]
    assert pairs_needed(differences, 0.045) == pairs_needed(differences, 0.045, 4)


def test_one_head_that_loses_decides_and_otherwise_the_slowest() -> None:
    found = Judgement.of(pairs(click=WIDE, buy=[0.1, 0.4, 0.2, 0.3]), planned=64)
    assert found.seeds_needed == found.heads[1].seeds_needed
    slow, slower = [0.01, -0.02, 0.0, 0.01], [0.02, -0.03, 0.01, 0.0]
    found = Judgement.of(pairs(click=slow, buy=slower), planned=64)
    assert found.seeds_needed == max(head.seeds_needed or 0 for head in found.heads)


def test_a_comparison_ends_where_every_head_is_clear() -> None:
    clear = pairs(click=GOOD * 8, buy=GOOD * 8)
    assert len(list(compare(iter(clear), planned=32))) == 8
    undecided = pairs(click=GOOD * 8, buy=WIDE * 8)
    assert len(list(compare(iter(undecided), planned=32))) == 32


def test_a_file_keeps_the_heads(job: TrainingJob, tmp_path: Path) -> None:
    pair = train_pair(replace(job_of(job, "dict"), steps=2), lambda model: None, 0)
    facts = RunFacts("plan", "cpu")
    PairFile(tmp_path / "pairs.jsonl", "one", facts).add(pair)
    assert PairFile(tmp_path / "pairs.jsonl", "one", facts).get(0, 0) == pair
    head, line = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert (head["loka_compare"], line["batches"]) == (3, pair.batches)


class Takes(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


BATCH = {"user": torch.ones(2), "item": torch.ones(2)}


@pytest.mark.parametrize(
    ("forward", "inputs", "expected"),
    [
        (lambda batch: None, BATCH, ((BATCH,), {})),
        (lambda batch, mask=None: None, BATCH, ((BATCH,), {})),
        (lambda user, item: None, BATCH, ((), BATCH)),
        (lambda user, item, mask=None: None, BATCH, ((), BATCH)),
        (lambda **features: None, BATCH, ((), BATCH)),
        (lambda batch: None, {"batch": 1}, ((), {"batch": 1})),
        (lambda batch: None, {3: 1}, (({3: 1},), {})),
        (lambda one, two: None, BATCH, ((), BATCH)),  # neither: its error names the keywords
        (lambda x: None, (1,), ((1,), {})),
        (lambda x: None, [1], ((1,), {})),
        (lambda x: None, 1, ((1,), {})),
    ],
)
def test_a_dict_is_the_one_argument_where_forward_takes_one(forward: Any, inputs: Any, expected: Any) -> None:
    assert arguments(Takes(forward), inputs) == expected


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_moves_to_a_device_keeps_its_type(holder: str) -> None:
    made = HOLDERS[holder][0](torch.ones(2), torch.ones(2))
    moved = to_device(made, "meta")
    assert type(moved) is type(made)
    assert {each.device.type for each in two_of(moved, ())} == {"meta"}
    assert {each.device.type for each in two_of(made, ())} == {"cpu"}
