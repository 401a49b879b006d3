"""The host's side of interactions: FM and dot interactions, concat norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused import checks, operators
from loka.kernels.fused.interaction import dot_reference, fm_reference
from loka.kernels.fused.interaction.concat_norm import (
    LARGEST_PARTS,
    ConcatNormBackward,
    ConcatNormConfiguration,
    ConcatNormForward,
    part_names,
)
from loka.kernels.fused.interaction.concat_norm_reference import concat_norm_backward, concat_norm_forward
from loka.kernels.fused.interaction.dot import DotConfiguration, DotSpec
from loka.kernels.fused.interaction.fm import FmBackward, FmConfiguration, FmForward, padded
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.launching import Launch, launch_by_name
from loka.kernels.fused.operators import SpecOperator


@dataclass(frozen=True)
class FmOperator(SpecOperator):
    """`FmForward` or `FmBackward`."""

    spec: FmForward | FmBackward
    how: FmConfiguration

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "fm_forward" if isinstance(self.spec, FmForward) else "fm_backward"

    @property
    def flops(self) -> int:  # type: ignore[override]
        sizes, forward = self.spec.sizes, isinstance(self.spec, FmForward)
        return (2 if forward else 4) * sizes.embeddings * sizes.dim * (2 * sizes.rank + sizes.made)

    def outputs(self, *arguments: Tensor) -> Any:
        given, sizes = dict(zip(self.spec.parameters, arguments, strict=True)), self.spec.sizes
        x = given["x"]
        checks.check_sample(x, sizes.embeddings, sizes.dim)
        batch = x.shape[0]
        if isinstance(self.spec, FmForward):
            products = x.new_empty((batch, sizes.embeddings, sizes.rank))
            return (products, x.new_empty((batch, sizes.made, sizes.dim))) if sizes.made else products
        programs = operators.programs(x, 1, self.how.programs) if x.dtype.itemsize == 2 else 1
        dx = x.new_empty((batch, sizes.embeddings, sizes.dim), dtype=given.get("passed", x).dtype)
        sums = [sizes.embeddings * sizes.rank, *([sizes.made * sizes.embeddings] if sizes.made else [])]
        return dx, *[x.new_empty((programs, each), dtype=torch.float32) for each in sums]

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Tensor], launch: Launch) -> None:
        given = dict(zip((*self.spec.parameters, *self.spec.results), (*arguments, *results), strict=True))
        x, sizes = given["x"], self.spec.sizes
        if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
            made = self.reference(*arguments)
            torch._foreach_copy_(list(results), list(made) if isinstance(made, tuple) else [made])
            return
        forward, by_sample = isinstance(self.spec, FmForward), ("dcompressed", "passed")
        for name in self.spec.parameters:
            given[name] = checks.whole_samples(given[name]) if name in by_sample else given[name].contiguous()
        values: dict[str, Any] = {"N": sizes.embeddings, "D": sizes.dim, "R": sizes.rank, "C": sizes.made}
        values |= {"N_HELD": padded(sizes.embeddings), "D_HELD" if forward else "CHUNK": self.how.chunk}
        values |= {"R_HELD": padded(sizes.rank), "C_HELD": padded(max(sizes.made, 1))}
        grid, stages = (operators.programs(x, 1, self.how.programs),), self.how.stages
        if not forward:
            values |= {f"{name}_stride": given[name].stride(0) if name in given else 0 for name in by_sample}
            grid = (given["drank"].shape[0],)
            narrow = "passed" not in given or given["passed"].dtype.itemsize == 2
            stages = self.how.stages if narrow else self.how.stages_wide  # that shared memory holds
        values |= {**given, "batch": x.shape[0], "STAGES": stages}
        launch_by_name(launch, getattr(kernels, self.kernel), grid, values, self.how.warps)

    def reference(self, *arguments: Tensor) -> Any:
        products = "" if self.spec.sizes.made else "_products"
        direction = "forward" if isinstance(self.spec, FmForward) else "backward"
        return getattr(fm_reference, f"fm{products}_{direction}")(*arguments)


@dataclass(frozen=True)
class ConcatNormOperator(SpecOperator):
    """`ConcatNormForward` or `ConcatNormBackward`."""

    spec: ConcatNormForward | ConcatNormBackward
    how: ConcatNormConfiguration

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "concat_norm_forward" if isinstance(self.spec, ConcatNormForward) else "concat_norm_backward"

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return "ScalarType dtype" if isinstance(self.spec, ConcatNormForward) else ""

    def _named(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """The arguments by name, without the parts, and the parts."""
        given = dict(zip((*self.spec.parameters, "dtype"), arguments, strict=False))
        return given, [given.pop(name) for name in part_names(self.spec.parts)]

    def _programs(self, rows: int, device: torch.device) -> int:
        return operators.programs_for(rows, device, self.how.rows, self.how.programs)

    def outputs(self, *arguments: Any) -> Any:
        given, parts = self._named(arguments)
        width, first, float32 = self.spec.width, parts[0], torch.float32
        checks.check_joined(*parts, width=width)
        residual = given.get("residual")
        if isinstance(self.spec, ConcatNormForward):
            joined = (first.shape[0], sum(part.shape[1] for part in parts), width)
            shape = joined if residual is None else residual.shape
            out = first.new_empty(shape, dtype=given["dtype"])
            statistics = [first.new_empty((shape[0] * shape[1],), dtype=float32) for _ in self.spec.results[1:]]
            return out, *statistics
        shape = given["grad"].shape if residual is None else residual.shape
        dx = first.new_empty(shape, dtype=self._widest(first, residual))
        programs = self._programs(shape[0] * shape[1], first.device)
        sums = [first.new_empty((programs, width), dtype=float32) for _ in self.spec.results[1:]]
        return (dx, *sums) if sums else dx

    @staticmethod
    def _widest(first: Tensor, residual: Tensor | None) -> torch.dtype:
        return first.dtype if residual is None else torch.promote_types(first.dtype, residual.dtype)

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        spec, (given, parts) = self.spec, self._named(arguments)
        given.pop("dtype", None)
        named = {name: tensor.contiguous() for name, tensor in given.items()}
        named |= dict(zip(spec.results, results, strict=True))
        rows = named["rstd"].shape[0]
        values = {**{f"n_{i}": 0 for i in range(LARGEST_PARTS)}, **named, "m": rows, "n": results[0].shape[1]}
        for i, part in enumerate(parts):
            values |= {f"part_{i}": part.contiguous(), f"n_{i}": part.shape[1]}
        values |= {"WIDTH": spec.width, "PADDED": padded_width(spec.width), "ROWS": self.how.rows}
        values |= {"EPS": spec.eps} if isinstance(spec, ConcatNormForward) else {}
        grid = (self._programs(rows, parts[0].device),)
        launch_by_name(launch, getattr(kernels, self.kernel), grid, values, self.how.warps)

    def reference(self, *arguments: Any) -> Any:
        spec, (given, parts) = self.spec, self._named(arguments)
        if isinstance(spec, ConcatNormForward):
            dtype = given.pop("dtype")
            forward = concat_norm_forward(parts, **given, norm=spec.norm, eps=spec.eps)
            shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), spec.width)
            found = {"out": forward.y.reshape(shape).to(dtype), "mean": forward.mean, "rstd": forward.rstd}
            return tuple(found[name] for name in spec.results)
        grad = given.pop("grad")
        backward = concat_norm_backward(grad, parts, **given, norm=spec.norm)
        dx = backward.x.reshape(grad.shape).to(self._widest(parts[0], given.get("residual")))
        found = {"dx": dx, "dweight": backward.weight, "dbias": backward.bias}
        return tuple(found[name] for name in spec.results) if len(spec.results) > 1 else dx


@dataclass(frozen=True)
class DotOperator(SpecOperator):
    """`DotSpec`."""

    spec: DotSpec
    how: DotConfiguration

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "dot_backward" if self.spec.backward else "dot_forward"

    @property
    def flops(self) -> int:  # type: ignore[override]
        return (4 if self.spec.backward else 2) * self.spec.embeddings**2 * self.spec.dim

    def outputs(self, *arguments: Tensor) -> Tensor:
        n, d, x = self.spec.embeddings, self.spec.dim, arguments[-1]
        checks.check_sample(x, n, d)
        return x.new_empty((x.shape[0], n, d if self.spec.backward else n))

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Tensor], launch: Launch) -> None:
        (result,), n, d, x = results, self.spec.embeddings, self.spec.dim, arguments[-1]
        if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
            result.copy_(self.reference(*arguments))
            return
        tensors = [tensor.contiguous() for tensor in arguments]
        names = (*self.spec.parameters, *self.spec.results)
        values: dict[str, Any] = dict(zip(names, (*tensors, result), strict=True))
        values |= {"batch": x.shape[0], "N": n, "D": d, "N_HELD": padded(n), "D_HELD": padded(d)}
        values |= {"STAGES": self.how.stages}
        grid = (operators.programs(x, 1, self.how.programs),)
        launch_by_name(launch, getattr(kernels, self.kernel), grid, values, self.how.warps)

    def reference(self, *arguments: Tensor) -> Tensor:
        backward = self.spec.backward
        return dot_reference.dot_backward(*arguments) if backward else dot_reference.dot_forward(*arguments)
