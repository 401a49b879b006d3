"""The operands of sites that a generated package runs in FP8, from the GEMM operators, dequantized.

The counter id of such an operator identifies its site and GEMM (docs/kernels.md). The statistics are then those of the
quantized values, with rounding and underflow. Other GEMMs of such a site call torch functions inside its
torch.autograd.Function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loka.numerics.enums import GEMM_NAMESPACE, Gemm
from loka.numerics.quantize import Quantized, dequantize
from loka.probe.capture.live_sites import LiveSite
from loka.probe.capture.operand_views import OperandProduct, rows_of, take_rows
from loka.probe.capture.row_sampling import RowNumbers, is_rerun
from loka.probe.stats.site_trackers import Trackers, apart

_COUNTER_ID = 8  # position of the operator's argument


class Patched:
    """Records the GEMMs of patched sites. `take` and `take_kept` return the number of operands added to a tracker."""

    def __init__(self, sites: tuple[LiveSite, ...], trackers: Mapping[str, Trackers], numbers: RowNumbers) -> None:
        self._any = bool(sites)
        self._trackers = trackers
        self._numbers = numbers
        self._gemms = {
            live.counter_id + offset: (live, gemm)
            for live in sites
            if live.counter_id is not None
            for offset, gemm in enumerate(Gemm)
        }

    def runs(self, func: Any) -> bool:
        """True if a function is a GEMM operator that sites may run on."""
        return self._any and isinstance(func, torch._ops.OpOverload) and func.namespace == GEMM_NAMESPACE

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Record one call of the operator."""
        found = self._gemms.get(args[_COUNTER_ID] if len(args) > _COUNTER_ID else kwargs.get("counter_id", -1))
        if found is None:
            return 0
        live, gemm = found
        trackers = self._trackers[live.site.name]
        a, scale_a, b, scale_b = args[:4]
        trackers.check_device(a)
        if gemm is Gemm.FPROP:
            return 0 if is_rerun() else self._take_input(trackers, a, scale_a)
        # dgrad does not run if the input needs no gradient; wgrad has the gradient too.
        if gemm is Gemm.DGRAD:
            return self._take_gradient(trackers, a, scale_a) if Gemm.WGRAD not in live.fp8 else 0
        return self._take_both(live, trackers, (a, scale_a), (b, scale_b))

    def take_kept(self, live: LiveSite, product: OperandProduct) -> int:
        """Record a native GEMM of a patched site: x @ weight.T, or dy @ weight in the backward."""
        trackers = self._trackers[live.site.name]
        trackers.check_device(product.x)
        site, index = live.site, None
        backward = is_rerun() and not torch.is_grad_enabled()
        if backward:
            wanted = Gemm.DGRAD not in live.fp8 and Gemm.WGRAD not in live.fp8
            fits = (product.k, product.n) == (site.n, site.k)
        else:
            wanted = Gemm.FPROP not in live.fp8 and Gemm.WGRAD not in live.fp8 and not is_rerun()
            fits = (product.k, product.n) == (site.k, site.n)
        if not wanted or not fits:
            return 0
        with apart(product.x.device):
            x = product.x.detach()
            index = self._numbers.draw(rows_of(x), x.device)
            if backward:
                trackers.take_gradient(x, index, None)
            else:
                trackers.take_input(x, index)
        return 1

    def _take_input(self, trackers: Trackers, values: Tensor, scale: Tensor) -> int:
        with apart(values.device):
            x = dequantize(Quantized(values, scale))
            trackers.take_input(x, self._numbers.draw(rows_of(x), x.device))
        return 1

    def _take_gradient(self, trackers: Trackers, values: Tensor, scale: Tensor) -> int:
        with apart(values.device):
            grad = dequantize(Quantized(values, scale))
            trackers.take_gradient(grad, self._numbers.draw(rows_of(grad), grad.device), None)
        return 1

    def _take_both(self, live: LiveSite, trackers: Trackers, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> int:
        """Record wgrad's operands, dy.t() and x.t(): the gradient, and matching rows of the input."""
        with apart(a[0].device):
            grad, x = dequantize(Quantized(*a)).t(), dequantize(Quantized(*b)).t()
            index = self._numbers.draw(rows_of(x), x.device)
            rows = take_rows(x, index) if Gemm.FPROP in live.fp8 else trackers.take_input(x, index)
            trackers.take_gradient(grad, index, trackers.joint_part(rows))
        return 1
