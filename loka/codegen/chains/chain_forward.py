"""Views of a chain's forward: the kernel that makes each operand, the GEMM that reads it, and when it is freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_names import ChainNames
from loka.codegen.chains.chain_shapes import ChainShape, NormShape, StageShape
from loka.codegen.chains.chain_views import OPERAND, ForwardStage, Launch, TorchStep, launch
from loka.codegen.chains.static_operands import both_copies, input_kernel, maximum, under
from loka.codegen.modules.gemm_calls import GemmView, gemm_view
from loka.codegen.modules.linear_recipes import SiteRecipe
from loka.errors import LokaError
from loka.graph.patterns.norm import TORCH_NORMS, norm_signature
from loka.kernels.fused.norm.norm_spec import GATES, NormForward
from loka.kernels.fused.quantize_weights import QuantizeWeights, grouped
from loka.kernels.fused.rendering import AnySpec
from loka.numerics.enums import Gemm

SUMS_DTYPE = "sums_dtype"  # dtype of sums and products with arguments, by torch's promotion


def gemm_of(recipe: SiteRecipe, gemm: Gemm) -> GemmView:
    """View of one of a chain's FP8 GEMMs. Raises LokaError if it has no recipe."""
    found = dict(recipe.items())[gemm]
    if found is None:
        raise LokaError(f"a chain's {gemm} has no recipe. This is a fault in LoKA: please report it.")
    return gemm_view(gemm, found)


@dataclass(frozen=True, slots=True)
class ChainForward:
    """The forward of one shape, for training or for frozen weights; `x`: name of its input."""

    shape: ChainShape
    names: ChainNames
    frozen: bool
    x: str

    def input(self) -> Launch | None:
        """Launch that makes the first linear's input; with a static scale and without a norm, its transpose too."""
        stage, names = self.shape.stages[0], self.names
        if not self.shape.fp8 and stage.before is None:
            return None
        spec: AnySpec
        if self.shape.known and not self.frozen:
            spec = input_kernel(self.shape, 0)
        else:
            before = shapes.forward_before(stage, quantize=self.shape.fp8, save=not self.frozen)
            spec = under(before, stage.x) if self.shape.fp8 else before
        arguments = {"x": self.x, "weight": "pre_norm_weight", "bias": "pre_norm_bias", "dtype": "dtype"}
        arguments |= names.static_scale("x", 0)
        results = {"out": names.hidden(0), "mean": "pre_mean", "rstd": "pre_rstd"}
        results |= {**names.both_copies("x", 0), **names.quantized("x", 0, self.frozen)}
        return launch(spec, arguments, results)

    def cast_weights(self) -> tuple[Launch, ...]:
        """Launches that quantize the weights of several stages at once."""
        return tuple(self._cast_together(stages) for stages in self._together())

    def _together(self) -> list[list[int]]:
        """The stages whose weights share a launch; none with static scales or frozen weights."""
        if not self.shape.fp8 or self.shape.known or self.frozen:
            return []
        return grouped(self._quantizer(index) for index in range(len(self.shape.stages)))

    def _cast_together(self, stages: list[int]) -> Launch:
        spec = QuantizeWeights(tuple(self._quantizer(index) for index in stages))
        weights = tuple(f"weight{self.names.suffix(index)}" for index in stages)
        return Launch(spec, weights, (), tuple(self.names.quantized("weight", index)[OPERAND] for index in stages))

    def _quantizer(self, index: int) -> NormForward:
        """The kernel that quantizes a stage's weight alone."""
        return shapes.quantizer(self.shape.stages[index].k, self.shape.stages[index].given)

    def stages(self) -> tuple[ForwardStage, ...]:
        """All stages in order."""
        return tuple(self._stage(index) for index in range(len(self.shape.stages)))

    def _stage(self, index: int) -> ForwardStage:
        stage, s, fp8 = self.shape.stages[index], self.names.suffix(index), self.shape.fp8
        last = index == len(self.shape.stages) - 1
        adds_bias = stage.bias and not stage.followed and (last or not fp8)
        alone = fp8 and not self.frozen and not any(index in stages for stages in self._together())
        return ForwardStage(
            suffix=s,
            cast_weight=self._cast_weight(index) if alone else (),
            fprop=gemm_of(stage.recipe, Gemm.FPROP) if fp8 else None,
            x=self.names.hidden(index),
            operand=self.names.operand("x", index, self.frozen),
            weight=(f"weight{s}", f"scale{s}") if self.frozen else self.names.operand("weight", index),
            bias=f"bias{s}" if adds_bias else None,
            epilogue=self._epilogue(index) if stage.followed or (fp8 and not last) else None,
            freed=self._freed(index) if fp8 and not last and not self.frozen else (),
        )

    def _cast_weight(self, index: int) -> tuple[Launch, ...]:
        """Launches that quantize a stage's weight; with static scales: find its maximum, then write both copies."""
        stage, s = self.shape.stages[index], self.names.suffix(index)
        weight = {"x": f"weight{s}", "maxima": f"weight_maxima{s}"}
        if not self.shape.known:
            return (launch(self._quantizer(index), weight, self.names.quantized("weight", index)),)
        return (
            launch(maximum(stage.k), weight, {"amax": f"weight_maxima{s}"}),
            launch(both_copies(stage.weight), weight, self.names.both_copies("weight", index)),
        )

    def _epilogue(self, index: int) -> Launch:
        """Launch on a product, which writes the next linear's input or the result."""
        stage, names, fp8 = self.shape.stages[index], self.names, self.shape.fp8
        s, last = names.suffix(index), index == len(self.shape.stages) - 1
        keep = fp8 and self.shape.keeps(index, self.frozen)
        spec: AnySpec
        if self.shape.known and not (last or self.frozen):
            spec = input_kernel(self.shape, index + 1)
        else:
            after = shapes.forward_after(stage, fp8 and not last, save=not self.frozen, keep=keep)
            spec = under(after, self.shape.stages[index + 1].x) if fp8 and not last else after
        arguments = {**names.after(index), "x": f"y{s}", "dtype": "dtype", **names.static_scale("x", index + 1)}
        if stage.summed:
            arguments |= {"times": names.source(stage.times, self.x), "residual": names.source(stage.residual, self.x)}
            arguments["dtype"] = SUMS_DTYPE
        results = {"kept": names.sum(index), "mean": f"mean{s}", "rstd": f"rstd{s}"}
        results["out"] = "out" if last else names.hidden(index + 1)
        if fp8 and not last:
            results |= {**names.both_copies("x", index + 1), **names.quantized("x", index + 1, self.frozen)}
        return launch(spec, arguments, results)

    def _freed(self, index: int) -> tuple[str, ...]:
        """The matrices of a stage that are not read again."""
        stage, s = self.shape.stages[index], self.names.suffix(index)
        residual = [self.names.sum(stage.residual)] if isinstance(stage.residual, int) else []
        saved = self.names.saved()
        return tuple(name for name in (f"x_fp8{s}", f"weight_fp8{s}", f"y{s}", *residual) if name not in saved)


def sums_dtype(stages: tuple[ForwardStage, ...], names: ChainNames) -> tuple[str, ...] | None:
    """The arguments whose dtypes decide that of sums; None if no kernel takes it."""
    launches = [stage.epilogue for stage in stages if stage.epilogue is not None]
    return names.summed if any(SUMS_DTYPE in each.arguments for each in launches) else None


def torch_steps(shape: ChainShape, names: ChainNames) -> tuple[TorchStep, ...]:
    """The chain in torch operations."""
    steps: list[TorchStep] = []
    for index, stage in enumerate(shape.stages):
        steps += _torch_stage(stage, names, index, steps[-1].result if steps else "x")
        if shape.reader(index) is not None:
            steps[-1] = replace(steps[-1], result=names.sum(index))
    return tuple(steps)


def _torch_stage(stage: StageShape, names: ChainNames, index: int, x: str) -> Iterator[TorchStep]:
    """One stage in torch operations, from x to y."""
    s = names.suffix(index)
    if stage.before is not None:
        yield from _torch_norm(stage.before, stage.k, x, "y", "pre_norm", "")
        x = "y"
    yield TorchStep("y", (x, f"weight{s}", *([f"bias{s}"] if stage.bias else [])), function="linear")
    if stage.times is not None:
        yield TorchStep("y", ("y", names.source(stage.times)), operator="*")
    if stage.residual is not None:
        yield TorchStep("y", ("y", names.source(stage.residual)), operator="+")
    gates = stage.activation in GATES
    if gates and stage.after is None:
        raise LokaError("a gate stands without its norm. This is a fault in LoKA: please report it.")
    if stage.after is not None:
        yield from _torch_norm(stage.after, stage.n, "y", "gate" if gates else "y", "norm", s)
    if gates:
        yield TorchStep("gate", ("gate",), function=str(stage.activation).removeprefix("gate_"))
        yield TorchStep("y", ("y", "gate"), operator="*")
    elif stage.activation is not None:
        yield TorchStep("y", ("y",), function=stage.activation)


def _torch_norm(norm: NormShape, width: int, x: str, result: str, name: str, suffix: str) -> Iterator[TorchStep]:
    """A norm in torch operations; a block_norm is an rms_norm between unflatten and flatten."""
    if norm.kind == "block_norm":
        yield TorchStep("blocks", (x, -1, (width // norm.block, norm.block)), method="unflatten")
        yield TorchStep("blocks", ("blocks", (norm.block,), None, norm.eps), function="rms_norm")
        yield TorchStep(result, ("blocks", -2), method="flatten")
        return
    given = {
        "input": x,
        "normalized_shape": (width,),
        "weight": f"{name}_weight{suffix}" if norm.weight else None,
        "bias": f"{name}_bias{suffix}" if norm.bias else None,
        "eps": norm.eps,
        **TORCH_NORMS[norm.kind].fixed,
    }
    yield TorchStep(result, tuple(given[name] for name in norm_signature(norm.kind).parameters), function=norm.kind)
