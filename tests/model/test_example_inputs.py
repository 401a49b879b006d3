"""Example inputs from the batches of training, where no function makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loka.errors import InputError
from loka.model.build_model import build_model

Write = Callable[[str], str]

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU())

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randn(batch_size, 8, generator=generator),), torch.zeros(batch_size)

def wrong(batch_size, seed):
    {wrong}
"""
numbers = iter(range(1000))


@pytest.fixture
def write(tmp_path, monkeypatch) -> Write:
    """`write(text)`: a module in the current directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def run(wrong: str = "return []", more: str = "") -> str:
        name = f"loka_batches_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(MODEL.format(wrong=wrong) + more)
        return name

    return run


def test_the_first_batch_gives_the_example(write) -> None:
    name = write()
    built = build_model(f"{name}:build", None, 5, batches=f"{name}:batches")
    expected = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(built.args[0], expected)
    assert build_model(f"{name}:build", None, 6, batches=f"{name}:batches").args[0].shape == (6, 8)


def test_a_function_of_the_module_comes_first(write) -> None:
    name = write(more="def example_inputs(batch_size):\n    return torch.ones(batch_size, 8)\n")
    built = build_model(f"{name}:build", None, 5, batches=f"{name}:batches")
    assert torch.equal(built.args[0], torch.ones(5, 8))


def test_a_list_of_inputs_is_taken_as_training_takes_it(write) -> None:
    name = write("yield [torch.ones(batch_size, 8)], torch.zeros(batch_size)")
    assert build_model(f"{name}:build", None, 5, batches=f"{name}:wrong").args[0].shape == (5, 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("return []", r"wrong\(5, 0\): there is no batch in what it returned; yield \(inputs, target\)"),
        ("return None", r"wrong\(5, 0\) raised TypeError: .*; make this call work first"),
        ("raise KeyError('ids')", "raised KeyError: 'ids'"),
        ("yield torch.ones(5, 8)", r"the first batch of .*:wrong is a Tensor; each has to be \(inputs, target\)"),
        (
            "yield torch.ones(256, 8), torch.zeros(256, 1)",
            r"asked for batches of 5, begins with a target of shape \(256, 1\); yield as many samples as are asked for",
        ),
        ("yield 'text', torch.zeros(5)", r"wrong returned a str; return a tuple"),
    ],
)
def test_batches_that_cannot_be_used(write, wrong: str, said: str) -> None:
    name = write(wrong)
    with pytest.raises(InputError, match=r"^train\.batches: .*" + said):
        build_model(f"{name}:build", None, 5, batches=f"{name}:wrong")


def test_without_anything_all_three_places_are_named(write) -> None:
    name = write()
    places = r".*by --inputs or --batches of loka init.* in model\.inputs.*in train\.batches \[LK012\]$"
    with pytest.raises(InputError, match=r"model\.inputs: no example inputs " + places):
        build_model(f"{name}:build", None, 5)
