"""Joins: which norms take a concatenation and a residual along; block norms over whole rows are among them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.codegen.chains.interactions import ConcatNormShape, concat_norm_shape
from loka.graph.expression import local
from loka.graph.ir import ForwardIR
from loka.graph.patterns.concat_norm import concatenated_norm
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.kernels.fused.interaction.concat_norm import ConcatNormForward
from loka.mods.norms import BlockNorm


class ViewedNorm(nn.Module):
    """BlockNorm by a view to the sizes that were read before."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        shape = y.shape
        return nn.functional.rms_norm(y.view(-1, self.block), (self.block,), eps=1e-6).view(shape)


class Joining(nn.Module):
    """norm(cat(x @ a, x @ b) + x) of x (B, 6, 32), as a Wukong layer ends."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.first(x[:, :2]), self.second(x[:, 2:])], 1)
        return self.norm(joined + x)


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = Joining(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def traced(norm: nn.Module, width: int = 32) -> ForwardIR:
    model = Model(norm)
    batches = {batch: ModelInputs((torch.randn(batch, 6, width),), {}) for batch in (5, 8)}
    examples = capture_examples(model, ["body"], batches)["body"]
    found = trace_forward(model.body, "body", examples, inline=["norm"], sites=["first", "second"])
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("norm", [BlockNorm(32), nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)])
def test_a_block_norm_over_whole_rows_is_an_rms_norm(norm):
    forward = traced(norm)
    (join,) = forward.joins
    assert forward.result == local(forward.statements[join.norm].target)
    found = concatenated_norm(forward, join)
    assert found is not None
    assert (found.kind, found.width, found.weight) == ("rms_norm", 32, None)
    assert concat_norm_shape(join, forward) == ConcatNormShape(
        ConcatNormForward(32, 2, True, "rms_norm", False, False, 1e-6)
    )
    # The concatenation, the sum and what the norm is written as are consecutive here, and all taken.
    assert sorted(join.places) == list(range(min(join.places), join.norm + 1))
    assert {"cat", "add"} <= {forward.statements[place].op for place in join.skipped}


@pytest.mark.parametrize("norm", [BlockNorm(16), ViewedNorm(16)])
def test_blocks_smaller_than_a_row_join_nothing(norm):
    assert traced(norm).joins == ()
