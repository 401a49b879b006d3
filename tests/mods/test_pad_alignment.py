"""pad_alignment on random sizes: the same function, and operands whose sizes the kernels take."""

from __future__ import annotations

import pytest
import torch

from loka.errors import LokaError
from loka.graph.expression import PRODUCT, text_of
from loka.graph.ir import ForwardIR
from loka.mods.rewriting import pad_alignment
from loka.mods.rewriting.pad_alignment import Pad
from loka.mods.rewriting.rewriting_tools import Size
from tests.support.models import forward_mods as zoo


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "to"), [(seed, (8, 16, 128)[seed % 3]) for seed in range(12)])
def test_random_sizes_are_the_same_function(seed: int, to: int) -> None:
    torch.manual_seed(seed)
    body = zoo.Odd(seed)
    forward, sizes, _ = zoo.traced(body, body.inputs)
    sizes = {name: Size(sizes[name].n, sizes[name].k) if name == "second" else size for name, size in sizes.items()}
    found = pad_alignment.find(forward, {name: (size, to) for name, size in sizes.items()})
    aligned = {name for name, size in sizes.items() if size.k % to == 0 and size.n % to == 0}
    assert {pad.name for pad in found} | aligned == {"first", "second", "left"}
    assert all(size.k % to == 0 and size.n % to == 0 for size in (pad.padded for pad in found))
    for pad in found:
        forward = pad.rewritten(forward)
    zoo.assert_same(body, forward, body.inputs)


def padded(sizes: Size, bias: bool = True) -> ForwardIR:
    body = torch.nn.Sequential(torch.nn.Linear(sizes.k, sizes.n, bias=bias))
    forward, known, _ = zoo.traced(body, lambda batch: (torch.randn(batch, sizes.k),))
    (pad,) = pad_alignment.find(forward, {name: (size, 16) for name, size in known.items()})
    return pad.rewritten(forward)


def test_k_alone_keeps_the_product_as_it_is() -> None:
    (step,) = padded(Size(13, 512)).statements
    assert step.text().endswith(
        "torch.nn.functional.linear(torch.nn.functional.pad(input, (0, 3)), "
        "torch.nn.functional.pad(self[0].weight, (0, 3)), self[0].bias)"
    )
    assert step.call is not None
    assert step.call.out == PRODUCT


def test_n_alone_keeps_the_input_as_it_is_and_cuts_the_product() -> None:
    (step,) = padded(Size(32, 1)).statements
    assert step.call is not None
    parts = (step.call.x, step.call.weight, step.call.bias, step.call.out)
    assert tuple(map(text_of, parts)) == (
        "input",
        "torch.nn.functional.pad(self[0].weight, (0, 0, 0, 15))",
        "torch.nn.functional.pad(self[0].bias, (0, 15))",
        "product[..., :1]",
    )


def test_aligned_sizes_are_left_alone() -> None:
    body = torch.nn.Sequential(torch.nn.Linear(32, 48))
    forward, sizes, _ = zoo.traced(body, lambda batch: (torch.randn(batch, 32),))
    assert pad_alignment.find(forward, {name: (size, 16) for name, size in sizes.items()}) == ()
    with pytest.raises(LokaError, match="'1' does not stand in its forward"):
        Pad("1", ("1",), 13, 16, 16).rewritten(forward)
