"""torch's FLOP counter finds in a bound model what it finds in the model itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from generated import ranker as package
from loka.zoo import ranker, ranker_inputs

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")


def flops(model: nn.Module, mode: str) -> int:
    with FlopCounterMode(display=False) as counter:
        if mode == "train":
            model(*ranker_inputs(64)).sum().backward()
        else:
            with torch.no_grad():
                model(*ranker_inputs(64))
    return counter.get_total_flops()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_flops_of_a_bound_model_are_those_of_the_model(mode: str) -> None:
    model = ranker()
    own = flops(model, mode)
    package.apply(model, mode=mode)
    assert flops(model, mode) == own > 1e8
