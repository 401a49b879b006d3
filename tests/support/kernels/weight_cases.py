"""Weights that share a launch: narrow and wide, whole and masked columns, with zeros behind them, and their data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.codegen.chains.chain_shapes import quantizer
from loka.kernels.fused.quantize_weights import QuantizeWeights


def weights_of(*widths: int | tuple[int, int]) -> QuantizeWeights:
    """The launch for weights of these widths; (479, 480) has zeros behind 479 columns."""
    sizes = [(width, 0) if isinstance(width, int) else (width[1], width[0]) for width in widths]
    return QuantizeWeights(tuple(quantizer(to, given) for to, given in sizes))


def widths_of(spec: QuantizeWeights) -> str:
    """The widths of weights, for names of cases: 479_to_480-1024."""
    return "-".join(f"{each.width}_to_{each.aligned}" if each.aligned else str(each.width) for each in spec.quantizers)


WEIGHTS = [
    weights_of(128, 256),
    weights_of(256, 256, 256),
    weights_of(16, 24, 48),
    weights_of((479, 480), 1024, (1000, 1024)),
    weights_of((13, 16), (5, 128), (1000, 1024)),
    weights_of(512, 2048, 48, 3456),
    weights_of(*[64] * 8),
]
WIDE = [weights_of(1024, 1024), weights_of(4096, 4096), weights_of(8192, 24), weights_of(256, 16384, 9000)]
ROWS = (1, 5, 17, 130, 0)
CORNERS = 8  # rows in which `odd_weights` has corner cases


def odd_weights(spec: QuantizeWeights, device: str = "cpu") -> list[Tensor]:
    """Weights of other numbers of rows and other dtypes each; every second one cut from a wider one, of strided rows.

    Zeros, infinities, NaN, and the largest and smallest values stand in the first rows.
    """
    found = []
    for index, each in enumerate(spec.quantizers):
        rows = ROWS[(index + each.width) % len(ROWS)]
        generator = torch.Generator().manual_seed(rows + each.width)
        x = torch.randn(rows, each.width, generator=generator)
        corners = [0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-38, 448.0 * 2.0**-20, 1.75]
        for row, corner in enumerate(corners[: min(rows, CORNERS)]):
            x[row, row % each.width :: 7] = corner
        x[:1] = 0.0
        dtype = (torch.bfloat16, torch.float32)[index % 2]
        wider = F.pad(x, (0, 3), value=1e30)[:, : each.width] if index % 2 else x
        found.append(wider.to(device, dtype))
    return found
