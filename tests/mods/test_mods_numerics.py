"""Adapted models against plain formulas in float64, forward and backward, over random shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.mods.adapt import adapt, convert, is_adapted
from loka.mods.adaptation import Adaptation
from loka.mods.norms import BlockNorm, block_of
from tests.support.models import adapted_models as models

MODS = ("no_bias", "block_norm", "hard_swish", "norm_first")
WIDTHS = st.sampled_from([13, 16, 24, 32, 48, 64, 96, 100, 128, 256])


def root(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def norm(x: Tensor, module: nn.Module, block: int | None) -> Tensor:
    """What a norm does, with the parameters that it has; `block`: what BlockNorm makes of it."""
    eps = module.eps
    if eps is None:
        eps = torch.finfo(x.dtype).eps if block is None else 1e-6
    if block is not None:
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        return (blocks / root(blocks, eps)).reshape(x.shape)
    if isinstance(module, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / root(centred, eps) * module.weight + module.bias
    return x / root(x, eps) * module.weight


def swish(x: Tensor, hard: bool) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6 if hard else x / (1 + torch.exp(-x))


def reference(plain: nn.Sequential, adapted: nn.Sequential, mods: Sequence[str], most: int, x: Tensor) -> Tensor:
    """The formulas of an MLP under some mods; Parameters are the adapted model's, whose names are the plain one's."""
    parts = dict(plain.named_children())
    last = str(len(parts) - 1)
    for place in range(0, len(parts) - 1, 3):
        linear, old = adapted.get_submodule(str(place)), parts[str(place + 1)]
        inputs, outputs = linear.in_features, linear.out_features
        own = adapted.get_submodule(str(place + 1))
        own = own if isinstance(own, nn.LayerNorm | nn.RMSNorm) else old
        block = block_of(outputs, most) if "block_norm" in mods else None
        first = "norm_first" in mods
        if first and block is not None and "block_norm" in mods:
            smaller = block_of(inputs, block)
            first, block = smaller is not None, smaller or block  # a width without a block: the norm stays behind
        x = norm(x, own, block) if first else x
        bias = 0.0 if "no_bias" in mods else linear.bias
        x = x @ linear.weight.t() + bias
        x = x if first else norm(x, own, block)
        x = swish(x, "hard_swish" in mods)
    head = adapted.get_submodule(last)
    return x @ head.weight.t() + head.bias


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(WIDTHS, min_size=2, max_size=4),
    mods=st.sets(st.sampled_from(MODS)),
    kind=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    rows=st.integers(1, 9),
    most=st.sampled_from([16, 64, 256]),
    outlier=st.sampled_from([1.0, 100.0]),
)
def test_mlps_alone_and_together(widths, mods, kind, rows, most, outlier):
    mods = [mod for mod in MODS if mod in mods]
    plain = models.mlp(*widths, norm=kind).double()
    models.random_parameters(plain)
    adapted = models.mlp(*widths, norm=kind).double()
    x = torch.randn(rows, widths[0], dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    x[0] *= outlier
    adaptations = models.carried_out(mods, adapted, x, block=most)
    models.random_parameters(adapted, seed=1)
    again = models.mlp(*widths, norm=kind).double()
    adapt(again, adaptations)
    assert is_adapted(again, adaptations)
    again.load_state_dict(adapted.state_dict())
    results = []
    for run in (lambda x: again(x), lambda x: reference(plain, adapted, mods, most, x)):
        leaf = x.clone().requires_grad_()
        adapted.zero_grad()
        again.zero_grad()
        out = run(leaf)
        out.square().sum().backward()
        owner = again if not results else adapted
        gradients = {name: parameter.grad for name, parameter in owner.named_parameters() if parameter.grad is not None}
        results.append({"y": out.detach(), "x": leaf.grad, **gradients})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-9, atol=1e-9, msg=name)


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=3, max_size=6),
    batch=st.integers(1, 5),
    kept=st.integers(0, 4),
    data=st.data(),
)
def test_folding_keeps_the_function(widths, batch, kept, data):
    """Linears in a row: every bias but those that are kept goes into the next one that keeps its own."""
    count = len(widths) - 1
    keeps = {kept % count, count - 1, *data.draw(st.sets(st.integers(0, count - 1)))}
    plain = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()
    models.random_parameters(plain)
    x = torch.randn(batch, widths[0], dtype=torch.float64)
    found = models.find("no_bias", plain, x, match=lambda name: name.isdecimal() and int(name) not in keeps)
    assert {name for each in found.adaptations for name in each.modules} == {
        str(place) for place in range(count) if place not in keeps
    }
    expected, state = plain(x), plain.state_dict()
    folded = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()
    adapt(folded, found.adaptations)
    folded.load_state_dict(convert(state, found.adaptations))
    torch.testing.assert_close(folded(x), expected, rtol=1e-11, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.integers(1, 5),
    block=st.sampled_from([16, 32, 256]),
    lead=st.lists(st.integers(0, 3), max_size=2),
    eps=st.sampled_from([1e-6, 1e-3]),
)
def test_block_norm_is_the_formula_for_every_shape(blocks, block, lead, eps):
    x = torch.randn(*lead, 3, blocks * block, dtype=torch.float64)
    x[..., 0, :] = 0.0
    out = BlockNorm(block, eps)(x)
    parts = x.reshape(*lead, 3, blocks, block)
    torch.testing.assert_close(out, (parts / root(parts, eps)).reshape(x.shape), rtol=1e-12, atol=1e-12)


def test_a_norm_of_blocks_says_what_it_is_and_refuses_other_widths():
    assert repr(BlockNorm(64, 1e-5)) == "BlockNorm(block=64, eps=1e-05)"
    with pytest.raises(RuntimeError, match="unflatten"):
        BlockNorm(64)(torch.randn(2, 96))


class SwishNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.norm(x)
        return out


@settings(max_examples=15, deadline=None)
@given(width=WIDTHS, mods=st.sets(st.sampled_from(["block_norm", "hard_swish"]), min_size=1))
def test_swish_norms(width, mods):
    model = nn.Sequential(nn.Linear(8, width), SwishNorm(width), nn.Linear(width, 1)).double()
    models.random_parameters(model)
    x = 3 * torch.randn(5, 8, dtype=torch.float64)
    adaptations: tuple[Adaptation, ...] = models.carried_out(sorted(mods), model, x)
    block = block_of(width, 256) if "block_norm" in mods else None
    assert len(adaptations) == ("hard_swish" in mods) + (block is not None)
    y = model[0](x)
    old = nn.LayerNorm(width) if block is not None else model[1].norm[0]
    normed = norm(y, old, block)
    gate = (normed + 3).clamp(0, 6) / 6 if "hard_swish" in mods else torch.sigmoid(normed)
    torch.testing.assert_close(model(x), model[2](y * gate), rtol=1e-11, atol=1e-11)
    assert type(model[1].norm[1]) is (nn.Hardsigmoid if "hard_swish" in mods else nn.Sigmoid)
