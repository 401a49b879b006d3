"""Both runs of a pair have to see the same batches; what batches do wrong is told with the step and the seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.bench.quality import batch_checksums, evaluation
from loka.bench.quality.batch_checksums import BatchChecksums
from loka.bench.quality.pair_file import PairFile, RunFacts
from loka.bench.quality.training import NonFiniteLossError, PairResult, build, train_pair, train_watched
from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # call, x, target -> x, target


def pair_of(job: TrainingJob, seed: int = 3) -> PairResult:
    return train_pair(job, lambda model: None, seed)


def with_calls(job: TrainingJob, change: Change, first: int = 5) -> TrainingJob:
    """The job whose n-th call of `batches` changes the batches from number `first` on."""
    calls = itertools.count(1)

    def batches(size: int, seed: int) -> Iterator[tuple[tuple[Tensor], Tensor]]:
        call = next(calls)
        for number, ((x,), target) in enumerate(job.batches(size, seed), 1):
            changed, labels = change(call, x, target) if number >= first else (x, target)
            yield (changed,), labels

    return replace(job, batches=batches)


def swapped_rows(x: Tensor) -> Tensor:
    return x[[1, 0, *range(2, len(x))]]


CHANGES: dict[str, Change] = {
    "another input": lambda call, x, target: (x + (call == 2), target),
    "the last digit of one": lambda call, x, target: (x.nextafter(x + 1) if call == 2 else x, target),
    "the order of rows": lambda call, x, target: (swapped_rows(x) if call == 2 else x, target),
    "the labels": lambda call, x, target: (x, 1 - target if call == 2 else target),
    "the order of labels": lambda call, x, target: (x, target.flip(0) if call == 2 else target),
    "the number of rows": lambda call, x, target: (x[call == 2 :], target[call == 2 :]),
}


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_first_step_with_other_batches_is_named(job: TrainingJob, change: str, shared: int) -> None:
    made = with_calls(replace(job, shared_steps=shared), CHANGES[change])
    with pytest.raises(InputError, match=r"train.batches: seed 3, patched: .* saw different batches, at step 5 first"):
        pair_of(made)


def test_a_generator_that_goes_on_where_it_was_is_no_pair(job: TrainingJob) -> None:
    stream = iter(job.batches(job.batch_size, 3))
    with pytest.raises(InputError, match=r"train.batches: seed 3, patched: .* saw different batches, at step 1 first"):
        pair_of(replace(job, batches=lambda size, seed: stream))
    longer = [3, 16]
    with pytest.raises(InputError, match=r"saw different batches, at step 4 first"):
        pair_of(replace(job, batches=lambda size, seed: itertools.islice(iter(job.batches(size, seed)), longer.pop(0))))


def test_a_model_that_writes_into_its_batch_sees_the_same(job: TrainingJob) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = job.factory()

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x) if self.training else 0.0
            logits: Tensor = self.body(x.mul_(0.5) + noise)
            return logits

    pair = pair_of(replace(job, factory=Writing))
    assert pair.ne_difference_percent == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False, True]), torch.arange(5), torch.randn(7).bfloat16(), torch.randn(3, 3).t(),
        torch.randn(2, dtype=torch.complex64), torch.tensor(3.0), torch.randn(4, 4).to_sparse(),
        torch.randn(9).to(torch.float8_e4m3fn), torch.randn(1).expand(3), torch.randn(3)[1:],
    ],
)  # fmt: skip
def test_a_checksum_is_of_the_bits_the_shape_and_the_place_of_any_tensor(tensor: Tensor) -> None:
    other = 2 * tensor if tensor.is_sparse else tensor.contiguous().clone()
    if not tensor.is_sparse:
        other.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).flatten()[-1:].zero_()
    checksums = BatchChecksums()
    for batch in ({"x": [tensor]}, (tensor,), (other,), (tensor, other), (other, tensor), (tensor[None],)):
        checksums.add(batch)
    checksums.read()
    first, *others = checksums.seen
    assert others[0] == first  # the same tensors in the same order
    assert len(set(others)) == 5


def test_a_pair_keeps_the_checksum_of_its_batches(job: TrainingJob) -> None:
    first, again, other = pair_of(job), pair_of(job), pair_of(job, 4)
    assert first.batches == again.batches != other.batches
    assert pair_of(replace(job, shared_steps=5)).batches == first.batches


def test_a_file_refuses_a_draw_of_other_batches(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    first = pair_of(replace(job, steps=2))
    PairFile(path, "one", RunFacts("plan", "cpu")).add(first)
    file = PairFile(path, "one", RunFacts("plan", "cpu"))  # after a stop
    file.add(replace(first, draw=1))
    with pytest.raises(InputError, match=r"seed 3: draw 2 saw other batches than draw 0, which .*pairs.jsonl has"):
        file.add(replace(first, draw=2, batches="another"))
    file.add(replace(first, seed=4, batches="another"))
    assert len(PairFile(path, "one", RunFacts("plan", "cpu"))) == 3


def test_batches_that_end_before_the_steps_are_done(job: TrainingJob) -> None:
    with pytest.raises(InputError, match=r"train.batches: seed 3: .* end after 16 steps, and 17 are asked for"):
        pair_of(replace(job, steps=17))
    assert pair_of(replace(job, steps=16)).as_is.steps == 16


def test_a_batch_of_another_width_for_a_model_of_torchs_modules(job: TrainingJob) -> None:
    """No code of the author's is in the traceback."""
    wide = with_calls(job, lambda call, x, target: (torch.cat([x, x], 1), target))
    says = (
        r"train.batches: seed 3, step 5: forward does not take a batch's inputs: mat1 and mat2 .* a tuple of \(64, 16\)"
    )
    with pytest.raises(InputError, match=says):
        pair_of(wide)
    with pytest.raises(InputError, match=r"train.batches: step 5: forward does not take"):
        train_watched(build(job, 3), job, wide.batches(64, 3), 3, lambda: None)
    narrow = replace(job, test_batches=with_calls(job, lambda call, x, target: (x[:, 1:], target), 2).batches)
    with pytest.raises(InputError, match=r"train.test: seed 3, batch 2: forward does not take a batch's inputs"):
        pair_of(replace(narrow, test_batch_size=64))


def test_a_loss_of_torchs_that_does_not_take_a_target(job: TrainingJob) -> None:
    short = with_calls(job, lambda call, x, target: (x, target[1:]))
    with pytest.raises(InputError, match=r"train.loss: seed 3, step 5: it does not take \(64,\) and \(63,\): Target"):
        pair_of(short)


def test_an_error_of_the_authors_own_notes_its_place(job: TrainingJob) -> None:
    def raising(call: int, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyError("user")

    with pytest.raises(KeyError) as caught:
        pair_of(with_calls(job, raising))
    assert caught.value.__notes__ == ["step 5", "seed 3"]


@pytest.mark.parametrize("run", [1, 2])
def test_a_loss_of_nan_is_told_with_seed_step_and_run(job: TrainingJob, run: int) -> None:
    made = with_calls(job, lambda call, x, target: (x * float("nan"), target)) if run == 1 else job

    def broken(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    where = r"training: seed 3: the loss is nan at step 5," if run == 1 else r"training: seed 3, patched: .* at step 1,"
    with pytest.raises(NonFiniteLossError, match=where):
        train_pair(made, broken, 3)


def test_test_batches_without_an_end_are_refused(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_ROWS", 2500)

    def endless(size: int, seed: int) -> Iterator[Any]:
        while True:
            yield from job.test_batches(size, seed)

    with pytest.raises(InputError, match=r"train.test: seed 3: .* not ended after 3 with 3000 rows: end them, as with"):
        pair_of(replace(job, test_batches=endless, steps=1))

    class Long(list[Any]):
        """With a length, which is believed."""

    four = replace(job, test_batches=lambda size, seed: Long(itertools.islice(endless(size, seed), 4)), steps=1)
    assert pair_of(four).as_is.steps == 1


def test_a_long_tensor_is_summed_in_pieces_and_a_change_in_any_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_checksums, "_PIECE", 1 << 14)
    x = torch.arange(20_000)
    checksums = BatchChecksums()
    checksums.add(x)
    for place in (0, 9_999, 19_999):
        other = x.clone()
        other[place] += 1
        checksums.add(other)
    checksums.add(x.roll(2048))  # whole pieces change places
    checksums.read()
    assert len(set(checksums.seen)) == 5
