"""A chain's shape as the values that its generated code gives to the runtime (`loka.kernels.chain_values`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_shapes import ChainShape, StageShape
from loka.codegen.chains.static_operands import both_copies, gradient_kernel, input_kernel, maximum, under
from loka.codegen.modules.gemm_calls import GemmRecipe, operator_name
from loka.kernels.chain_values import Chain, Launch, ScaledGemm, Stage, StageGemms
from loka.kernels.fused.matrix_kernels import LARGEST_COUNT, Products, Reduce, RequantizeTranspose, Transpose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantize_weights import QuantizeWeights, grouped
from loka.kernels.fused.rendering import AnySpec
from loka.kernels.gemm.m_buckets import table_text
from loka.numerics.enums import Accumulation, Gemm

# Names of a kernel's own arguments and results in a chain.
_VECTORS = {"add": "bias", "weight": "norm_weight", "bias": "norm_bias"}
_OF_BATCH_NORM = {"add": "norm_shift", "weight": "norm_scale", "bias": "norm_bias"}
_BATCH_NORM_SUMS = {"dweight": "norm_scale_sums", "dbias": "norm_bias_sums"}
_BATCH_NORM_MEANS = {"mean_dn": "norm_mean_dn", "mean_dn_n": "norm_mean_dn_n"}
_SUMS = {f"d{name}": f"{vector}_sums" for name, vector in _VECTORS.items()}
_INPUT = {"scale": "next_scale", "overflow_stats": "next_overflow_stats"}
_WEIGHT = {"x": "weight", "maxima": "weight_maxima"}
_GRADIENT = {
    **_VECTORS,
    "residual_grad_in": "residual_grad",
    "scale": "dy_scale",
    "overflow_stats": "dy_overflow_stats",
}
_GRADIENT_RESULTS = {**_SUMS, "dx": "dy", "residual_grad_out": "dsum"}


def operand(name: str) -> dict[str, str]:
    """Names of a quantizing kernel's results for an operand."""
    return {"values": f"{name}_fp8", "transposed": f"{name}_fp8_t"} | {
        key: f"{name}_{key}" for key in ("scale", "scale_max")
    }


@dataclass(slots=True)
class ChainStages:
    """The values of one shape; `specs`: the kernels that it launches."""

    shape: ChainShape
    specs: dict[AnySpec, None] = field(default_factory=dict)

    def chain(self) -> Chain:
        """The chain."""
        stages = self.shape.stages
        made = Chain(
            k=stages[0].given or stages[0].k,
            n=stages[-1].n,
            stages=tuple(self._stage(index) for index in range(len(stages))),
            head=self._head(),
            others=self.shape.others,
            weights=self._weights(),
            products=self._products(),
        )
        self._of_any_number()
        return made

    def weight_kernels(self) -> tuple[str, ...]:
        """For each stage the kernel that quantizes its weight by row; () without FP8, and with static scales."""
        if not self.shape.fp8 or self.shape.known:
            return ()
        together = {index for numbers in self._together() for index in numbers}
        number = range(len(self.shape.stages))
        return tuple("quantize_weights" if each in together else self._quantizer(each).function for each in number)

    def _kernel(self, spec: AnySpec, arguments: Mapping[str, str], results: Mapping[str, str]) -> Launch:
        self.specs.setdefault(spec)
        parameters = [*spec.parameters, *(["dtype"] if isinstance(spec, NormForward) and spec.takes_dtype else [])]
        read = [arguments.get(name, name) for name in parameters]
        return Launch(spec.function, " ".join(read), " ".join(results.get(name, name) for name in spec.results))

    # Forward.

    def _head(self) -> Stage:
        """What comes before the first linear."""
        stage, fp8 = self.shape.stages[0], self.shape.fp8
        norm = stage.before
        if not stage.ops_before:
            forward = self._forwards(self._input, "x") if fp8 else (None, None)
            return Stage(forward=forward[0], inference=forward[1])
        forward = self._forwards(self._input, "x")
        spec = shapes.backward_before(stage, carried=any(self._shares("x")))
        return Stage(
            parameters=" ".join(f"norm_{name}" for name in ("weight", "bias") if getattr(norm, name, False)),
            forward=forward[0],
            inference=forward[1],
            backward=self._kernel(spec, {**_GRADIENT, "x": "x"}, {**_SUMS}),
            multiplier=stage.before_multiplier,
        )

    def _input(self, inference: bool) -> AnySpec:
        """The kernel that makes the first linear's input."""
        stage, fp8 = self.shape.stages[0], self.shape.fp8
        if self.shape.known and not inference:
            return input_kernel(self.shape, 0)
        spec = shapes.forward_before(stage, quantize=fp8, save=not inference)
        return under(spec, stage.x) if fp8 else spec

    def _after(self, index: int, inference: bool) -> AnySpec:
        """The kernel on a product, which makes the next linear's input or the result."""
        stage, fp8 = self.shape.stages[index], self.shape.fp8
        last = index == len(self.shape.stages) - 1
        if self.shape.known and not (last or inference):
            return input_kernel(self.shape, index + 1)
        keep = fp8 and self.shape.keeps(index, inference)
        spec = shapes.forward_after(stage, fp8 and not last, save=not inference, keep=keep)
        return under(spec, self.shape.stages[index + 1].x) if fp8 and not last else spec

    def _forwards(
        self, spec_of: Callable[[bool], AnySpec], x: str, out: str = "x_plain", vectors: Mapping[str, str] = _VECTORS
    ) -> tuple[Launch | None, Launch | None]:
        """The kernels of training and of inference; the second is None if it is the first."""
        arguments, results = {"x": x, **vectors, **_INPUT}, {**operand("x"), "out": out, "kept": "sum"}
        first, other = (self._kernel(spec_of(inference), arguments, results) for inference in (False, True))
        return first, None if other == first else other

    def _weights(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose weights one launch quantizes."""
        launches = self._together()
        for numbers in launches:
            self.specs.setdefault(QuantizeWeights(tuple(self._quantizer(number) for number in numbers)))
        return tuple(map(tuple, launches))

    def _together(self) -> list[list[int]]:
        """The stages whose weights share a launch; none with static scales."""
        if not self.shape.fp8 or self.shape.known:
            return []
        return grouped(self._quantizer(index) for index in range(len(self.shape.stages)))

    def _quantizer(self, index: int) -> NormForward:
        """The kernel that quantizes a stage's weight alone."""
        return shapes.quantizer(self.shape.stages[index].k, self.shape.stages[index].given)

    def _weight(self, index: int) -> tuple[Launch, ...]:
        """Kernels that quantize a weight by itself; with static scales: find its maximum, then write both copies."""
        if not self.shape.fp8 or any(index in numbers for numbers in self._together()):
            return ()
        stage, results = self.shape.stages[index], {**operand("weight"), "amax": "weight_maxima"}
        specs = (maximum(stage.k), both_copies(stage.weight)) if self.shape.known else (self._quantizer(index),)
        return tuple(self._kernel(spec, _WEIGHT, results) for spec in specs)

    # Stages.

    def _stage(self, index: int) -> Stage:
        stage = self.shape.stages[index]
        last = index == len(self.shape.stages) - 1
        kernel = stage.followed or (self.shape.fp8 and not last)
        out = "out" if last else "x_plain"
        norm = stage.after
        columns = norm is not None and norm.over_columns
        forward: tuple[Launch | None, Launch | None] = (None, None)
        if kernel:
            own = _OF_BATCH_NORM if columns else _VECTORS
            forward = self._forwards(lambda inference: self._after(index, inference), "y", out, own)
        there = (stage.bias, norm is not None and norm.weight, norm is not None and norm.bias)
        vectors = [name for name, present in zip(_VECTORS.values(), there, strict=True) if present]
        vectors += ["running_mean", "running_var"] if columns else []
        static = [f"{name}_{part}" for name in ("x", "dy") for part in ("scale", "overflow_stats")]
        return Stage(
            parameters=" ".join(["weight", *vectors, *(static if self.shape.known else [])]),
            gemms=self._gemms(index),
            weight=self._weight(index),
            forward=forward[0],
            inference=forward[1],
            backward=self._backward(index),
            dropout=stage.dropout,
            norm_sums=self._norm_sums(stage),
            bias_in_gemm=stage.bias and not stage.followed and (last or not self.shape.fp8),
            unpadded_k=stage.given,
            times=stage.times,
            residual=stage.residual,
            multiplier=stage.multiplier,
        )

    def _gemms(self, index: int) -> StageGemms:
        """The three GEMMs of a stage, and their operands that are saved."""
        stage = self.shape.stages[index]
        if not self.shape.fp8:
            return StageGemms()
        fprop, dgrad, wgrad = (None if recipe is None else _gemm(kind, recipe) for kind, recipe in stage.recipe.items())
        x = ["x_fp8", "x_scale", "x_scale_max"]
        weight = ["weight_fp8", "weight_scale", "weight_scale_max"]
        if self.shape.known:
            copied = "transposed" in input_kernel(self.shape, index).results
            x = ["x_fp8_t" if copied else "x_fp8", "x_scale"]
            weight = ["weight_fp8_t", "weight_scale", "dy_scale"]
        saved = ["x_plain"] if stage.keeps_wgrad else x
        return StageGemms(
            fprop=fprop,
            dgrad=dgrad,
            wgrad=None if stage.keeps_wgrad else wgrad,
            saved=" ".join([*saved, *weight]),
            static=self.shape.known,
        )

    # Backward.

    def _backward(self, index: int) -> Launch | None:
        """The kernel from the gradient of a stage's result to that of its product; None if they are the same."""
        stage, shape = self.shape.stages[index], self.shape
        spec: AnySpec | None
        if stage.keeps_wgrad:
            spec = shapes.quantizer(stage.n)
            spec = under(spec, stage.dy) if shape.known else spec
        else:
            carried, carry = shape.reader(index) is not None, not shape.leaves_sum(index)
            spec = shapes.backward_after(stage, shape.fp8, carried=carried, carry=carry)
            spec = gradient_kernel(shape, index) if shape.known else spec
        if spec is None:
            return None
        x = "grad" if "grad" not in spec.parameters else "sum" if stage.summed else "y"
        if stage.by_result and index == len(shape.stages) - 1 and isinstance(spec, NormBackward):
            spec, x = replace(spec, summed=True), "out"  # whoever reads the result keeps it too
        columns = stage.after is not None and stage.after.over_columns
        own = _OF_BATCH_NORM | _BATCH_NORM_MEANS if columns else {}
        return self._kernel(spec, {**_GRADIENT, **own, "x": x}, {**_GRADIENT_RESULTS, **operand("dy")})

    def _norm_sums(self, stage: StageShape) -> Launch | None:
        """The kernel that runs before the gradient of a BatchNorm; None for another stage."""
        spec = shapes.norm_sums(stage)
        if spec is None:
            return None
        self.specs.setdefault(Reduce(len(spec.results)))
        return self._kernel(spec, {**_OF_BATCH_NORM, "x": "y"}, _BATCH_NORM_SUMS)

    def _shares(self, argument: str) -> tuple[list[int], list[tuple[int, bool]]]:
        """What stages add to an argument's gradient: each a matrix, or (stage, bias) the product of two.

        A stage is there twice if the gradient of its sum stays as two matrices.
        """
        plain: list[int] = []
        pairs: list[tuple[int, bool]] = []
        for index, stage in enumerate(self.shape.stages):
            parts = 2 if self.shape.leaves_sum(index) else 1
            plain += [index] * parts if stage.residual == argument else []
            plain += [index] if stage.multiplier == argument else []
            pairs += [(index, stage.bias)] * parts if stage.times == argument else []
        return plain, pairs

    def _products(self) -> tuple[tuple[str, str], ...]:
        """The kernels that add up the gradients of arguments, of those that have several terms."""
        found = []
        for argument in ("x", *self.shape.others):
            plain, pairs = self._shares(argument)
            through_linear = argument == "x" and not self.shape.stages[0].ops_before
            terms = len(plain) + through_linear + (argument == self.shape.stages[0].before_multiplier)
            if not (plain or pairs) or terms + 2 * len(pairs) == 1:
                continue
            width = argument_width(self.shape, argument)
            spec = Products(width, terms, tuple(bias for _, bias in pairs))
            self.specs.setdefault(spec)
            found.append((argument, spec.function))
        return tuple(found)

    def _of_any_number(self) -> None:
        """Add the kernels that take several operands: of transposed copies, and of partial sums."""
        shape, norm = self.shape, self.shape.stages[0].before
        guarded = norm is None or not (norm.weight or norm.bias)  # x's gradient is not always needed
        partial = 0
        for index in reversed(range(len(shape.stages))):
            stage = shape.stages[index]
            if shape.known and not stage.keeps_wgrad:
                kernels = (gradient_kernel(shape, index), input_kernel(shape, index))
                missing = ["transposed" in kernel.results for kernel in kernels].count(False)
                if missing:
                    self.specs.setdefault(Transpose(missing))
            elif shape.fp8 and not shape.known:
                self.specs.setdefault(RequantizeTranspose(1 if stage.keeps_wgrad else 3))
                if guarded and index == 0 and not stage.keeps_wgrad:
                    self.specs.setdefault(RequantizeTranspose(2))
            partial += self._sums_of(self._backward(index))
            if partial >= LARGEST_COUNT["reduce"]:
                self.specs.setdefault(Reduce(LARGEST_COUNT["reduce"]))
                partial -= LARGEST_COUNT["reduce"]
        partial += self._sums_of(self._head().backward)
        while partial > 0:
            self.specs.setdefault(Reduce(min(partial, LARGEST_COUNT["reduce"])))
            partial -= LARGEST_COUNT["reduce"]

    def _sums_of(self, kernel: Launch | None) -> int:
        return 0 if kernel is None else sum(name.endswith("_sums") for name in kernel.results.split())


def argument_width(shape: ChainShape, argument: str) -> int:
    """Number of columns of an argument that stages multiply by or add."""
    if argument == shape.stages[0].before_multiplier:
        return shape.stages[0].k

    def reads(stage: StageShape) -> bool:
        return argument in (stage.times, stage.residual, stage.multiplier)

    return next(stage.n for stage in shape.stages if reads(stage))


def _gemm(kind: Gemm, recipe: GemmRecipe) -> ScaledGemm:
    first, second = recipe.operands
    return ScaledGemm(
        operator_name(kind, recipe),
        (first.scaling.value, second.scaling.value),
        fast=recipe.accumulation == Accumulation.FAST,
        first_scale=(first.reads_first_scale, second.reads_first_scale),
        m_buckets=table_text(recipe.m_buckets) if recipe.m_buckets else "",
    )
