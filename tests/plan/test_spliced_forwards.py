"""A forward among whose statements those of kernels were put is compared with the module's own before it is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loka.graph.canonical.splicing import spliced
from loka.graph.expression import Call
from loka.graph.ir import ForwardIR
from loka.plan.planner import make_plan
from loka.plan.rewrite import rewrites
from loka.zoo.wukong import Wukong, WukongSizes

SIZES = WukongSizes(embeddings=8, dim=8, layers=2, rank=4, hidden=16)


def build() -> Wukong:
    return Wukong(SIZES)


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, SIZES.embeddings, SIZES.dim),)


def layer_of_plan(folder: Path) -> ForwardIR:
    path = folder / "small.yaml"
    path.write_text(
        f'version: 1\nname: small\nmodel: {{factory: "{__name__}:build", inputs: "{__name__}:inputs"}}\n'
        "defaults: {compute: keep, fuse: always}\nmods: [{use: fuse_interaction}]\n"
    )
    binding = next(each for each in make_plan(path).bindings if "layers.1" in each.modules)
    assert binding.forward is not None
    return binding.forward


def test_what_kernels_do_not_take_stays_as_it_was_traced(tmp_path: Path) -> None:
    texts = [step.text() for step in layer_of_plan(tmp_path).statements]
    assert any(text.endswith(".flatten(1)") for text in texts)  # the canonical form has flatten(-2)
    assert any(".view(-1, " in text for text in texts)  # and unflatten


def test_a_forward_that_computes_something_else_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was traced, wrongly put together: the whole canonical form, which was compared before, takes its place."""

    def twice(forward: ForwardIR, kept: frozenset[int]) -> ForwardIR:
        made = spliced(forward, kept)
        return replace(made, result=Call("operator.mul", (made.result, 2)))

    monkeypatch.setattr(rewrites, "spliced", twice)
    found = layer_of_plan(tmp_path)
    assert not isinstance(found.result, Call)
    texts = [step.text() for step in found.statements]
    assert not any(text.endswith(".flatten(1)") for text in texts)
    assert any(".flatten(-2)" in text for text in texts)
