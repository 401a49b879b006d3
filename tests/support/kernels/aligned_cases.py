"""Kernels that quantize rows and write zeros behind them."""

from __future__ import annotations

from loka.codegen.chains.chain_shapes import quantizer

# Several rows at a step and one; columns up to a power of two and short of one; many columns of zeros.
ALIGNED = [
    quantizer(to, width) for width, to in ((13, 16), (5, 128), (479, 480), (479, 512), (3384, 3392), (1000, 1024))
]
ROWS = (1, 5, 17)
