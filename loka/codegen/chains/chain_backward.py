"""Views of a chain's backward: stage by stage, from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_forward import gemm_of
from loka.codegen.chains.chain_names import ChainNames
from loka.codegen.chains.chain_shapes import ChainShape, StageShape
from loka.codegen.chains.chain_views import (
    OPERAND,
    BackwardStage,
    InputGradient,
    Launch,
    NormGradient,
    OtherGradient,
    StageKind,
    launch,
)
from loka.codegen.chains.static_operands import gradient_kernel, input_kernel, under
from loka.kernels.fused.matrix_kernels import LARGEST_COUNT, Products, Reduce, RequantizeTranspose, Transpose
from loka.kernels.fused.rendering import AnySpec
from loka.numerics.enums import Gemm


@dataclass(slots=True)
class ChainBackward:
    """The backward of one shape. Partial sums are collected over the stages and reduced at the end."""

    shape: ChainShape
    names: ChainNames
    _partial: list[str] = field(default_factory=list)  # vectors whose gradients exist as partial sums

    def stages(self) -> tuple[BackwardStage, ...]:
        """All stages, from the last to the first."""
        return tuple(self._stage(index) for index in reversed(range(len(self.shape.stages))))

    def _stage(self, index: int) -> BackwardStage:
        stage, s, kind = self.shape.stages[index], self.names.suffix(index), self._kind(index)
        static, fp8 = self.shape.known, self.shape.fp8
        carries = self.shape.reader(index) is not None and self.shape.leaves_sum(index)
        gradient = self._quantized(index) if stage.keeps_wgrad else self._gradient(index)
        self._partial += self._summed_up(gradient, self.names.after(index))
        transpose = self._static_transpose(index) if kind is StageKind.STATIC else None
        return BackwardStage(
            kind=kind,
            number=index,
            suffix=s,
            counter_id="ctx.counter_id" if len(self.shape.stages) == 1 else f"counter_id{s}",
            weight_position=self.position(f"weight{s}"),
            gradient=gradient,
            grad_stays=self._grad_stays(index, gradient),
            beside=self._residual_grad(index) if carries else None,
            sum=self.names.sum(index),
            x=self.names.plain_input(index) if stage.keeps_wgrad else self.names.hidden(index),
            bias=f"bias{s}" if stage.bias and not stage.followed else None,
            dgrad=gemm_of(stage.recipe, Gemm.DGRAD) if fp8 else None,
            wgrad=gemm_of(stage.recipe, Gemm.WGRAD) if fp8 and not stage.keeps_wgrad else None,
            dy=self.names.dy(index),
            weight_transposed=(f"weight_fp8_t{s}", f"weight_scale{s}")
            if static
            else ("weight_fp8_t", "weight_scale_t"),
            dx=self.dx(index),
            guarded=self._guarded(index),
            unpadded_k=stage.given,
            transpose_all=RequantizeTranspose(3) if kind is StageKind.FP8 else None,
            transpose_wgrad=RequantizeTranspose(2) if kind is StageKind.FP8 and self._guarded(index) else transpose,
            transpose_weight=RequantizeTranspose(1) if kind is StageKind.KEPT_WGRAD else None,
            freed_after_wgrad=transpose.results if transpose is not None and self._frees(index) else (),
            freed=self._freed(index) if self._frees(index) else (),
            reduce=self._full_launch(),
        )

    def _kind(self, index: int) -> StageKind:
        if self.shape.known:
            return StageKind.STATIC_KEPT_WGRAD if self.shape.stages[index].keeps_wgrad else StageKind.STATIC
        if not self.shape.fp8:
            return StageKind.NATIVE
        return StageKind.KEPT_WGRAD if self.shape.stages[index].keeps_wgrad else StageKind.FP8

    def dx(self, index: int) -> InputGradient:
        """The place where the gradient of a stage's input is computed."""
        if index or self._needs_dx:
            return InputGradient.ALWAYS
        if self.shape.stages[0].before is not None:
            return InputGradient.NORM
        return InputGradient.LAST if any(self._shares("x")) else InputGradient.PLAIN

    @property
    def _needs_dx(self) -> bool:
        """True if x's gradient is always computed: a norm with parameters before the first linear needs it."""
        return bool(self.names.pre_vectors())

    def _guarded(self, index: int) -> bool:
        return self.dx(index) is not InputGradient.ALWAYS

    def _frees(self, index: int) -> bool:
        """True if later work of the chain should run after the stage's matrices are freed."""
        return index > 0 or self.dx(0) is InputGradient.LAST

    def position(self, name: str) -> int:
        """Position of an argument among forward's."""
        return self.names.tensors().index(name)

    def optional(self) -> tuple[str, ...]:
        """The gradients that are computed only if needed."""
        weights = [f"weight{self.names.suffix(index)}" for index in range(len(self.shape.stages))]
        return (*([] if self._needs_dx else ["dx"]), *(f"d{name}" for name in (*self.shape.others, *weights)))

    def gradients(self) -> tuple[tuple[str, ...], ...]:
        """The values that backward returns, one for each argument of forward, in the same groups."""
        static = {name for index in range(len(self.shape.stages)) for name in self.names.static_scales(index)}
        found = [
            tuple("None" if name in static else f"d{name}" for name in group) for group in self.names.tensor_groups()
        ]
        return (*found, ("None",) * (1 + len(self.names.counter_ids())))

    # The gradient of a stage's product.

    def _gradient(self, index: int) -> Launch | None:
        """Launch from the gradient of a stage's result to that of its product; None if they are the same."""
        stage, names, s = self.shape.stages[index], self.names, self.names.suffix(index)
        read_again, carry = self.shape.reader(index) is not None, not self.shape.leaves_sum(index)
        spec: AnySpec | None = shapes.backward_after(stage, self.shape.fp8, carried=read_again, carry=carry)
        if spec is None:
            return None
        spec = gradient_kernel(self.shape, index) if self.shape.known else spec
        arguments = {"x": "grad"}
        if "grad" in spec.parameters:
            x = names.sum(index) if stage.summed else f"y{s}"
            arguments = {"grad": "grad", "x": x, **names.after(index), "mean": f"mean{s}", "rstd": f"rstd{s}"}
            arguments |= {"times": str(stage.times), "residual_grad_in": self._residual_grad(index) or ""}
        arguments |= names.static_scale("dy", index)
        results = {"values": "dy_fp8", "transposed": "dy_fp8_t"} if self.shape.known else {OPERAND: "dy_fp8"}
        results |= {"dx": "dy", "residual_grad_out": f"dsum{s}", **_partial_sums(names.after(index))}
        return launch(spec, arguments, results)

    def _quantized(self, index: int) -> Launch:
        """Launch that quantizes the output gradient for dgrad only."""
        stage, names = self.shape.stages[index], self.names
        spec = shapes.quantizer(stage.n)
        arguments = {"x": "grad", **names.static_scale("dy", index)}
        results = {"values": "dy_fp8", "scale": "dy_scale", "scale_max": "_"}
        return launch(under(spec, stage.dy) if self.shape.known else spec, arguments, results)

    def _residual_grad(self, index: int) -> str | None:
        """Name of the gradient that a stage's result has as the residual of a later stage, or None."""
        reader = self.shape.reader(index)
        return None if reader is None else f"dsum{self.names.suffix(reader)}"

    def _grad_stays(self, index: int, gradient: Launch | None) -> str | None:
        """New name of the gradient of a stage's result if it is kept; None if it is freed."""
        stage, s = self.shape.stages[index], self.names.suffix(index)
        if gradient is None:
            return None
        if self.shape.leaves_sum(index):
            return f"grad{s}"
        return f"dsum{s}" if stage.summed and "residual_grad_out" not in gradient.spec.results else None

    def _static_transpose(self, index: int) -> Launch | None:
        """With static scales: launch that transposes the operands of wgrad that have no transposed copy yet."""
        s = self.names.suffix(index)
        dy, x = gradient_kernel(self.shape, index), input_kernel(self.shape, index)
        missing = [] if "transposed" in dy.results else [("dy_fp8", "dy_fp8_t")]
        missing += [] if "transposed" in x.results else [(f"x_fp8{s}", f"x_fp8_t{s}")]
        if not missing:
            return None
        values, copies = zip(*missing, strict=True)
        return Launch(Transpose(len(missing)), values, copies)

    # Memory.

    def _freed(self, index: int) -> tuple[str, ...]:
        """The matrices that no earlier stage reads."""
        stage, s = self.shape.stages[index], self.names.suffix(index)
        saved = [f"x_fp8{s}", f"weight_fp8{s}", self.names.hidden(index), self.names.sum(index)]
        saved += [f"x_fp8_t{s}", *([f"weight_fp8_t{s}"] if index else [])]  # with static scales
        saved += [f"y{s}"] if stage.times is None else []  # a factor's gradient reads the product at the end
        reader, residual_grad = self.shape.reader(index), self._residual_grad(index)
        done = reader is not None and self.shape.stages[reader].times is None
        read = [residual_grad] if residual_grad is not None and done else []
        return tuple([name for name in saved if name in self.names.saved()] + read + self._made(index))

    def _made(self, index: int) -> list[str]:
        """The matrices that a stage always makes and only it reads."""
        stage = self.shape.stages[index]
        if not self.shape.fp8:
            return ["dy"] if shapes.backward_after(stage, quantize=False) is not None else []
        last = self.dx(index) is not InputGradient.ALWAYS  # its dgrad runs at the end
        if self.shape.known:
            transposed = not stage.keeps_wgrad and "transposed" in gradient_kernel(self.shape, index).results
            return [*([] if last else ["dy_fp8"]), *(["dy_fp8_t"] if transposed else [])]
        dgrad = [] if last else ["dy_fp8", "weight_fp8_t"]
        return dgrad if stage.keeps_wgrad else [*dgrad, "dy_fp8_t", "x_fp8_t"]

    def _summed_up(self, gradient: Launch | None, vectors: dict[str, str]) -> list[str]:
        """The vectors whose gradients a kernel writes as partial sums."""
        results = gradient.spec.results if gradient is not None else ()
        return [vector for key, vector in vectors.items() if f"d{key}" in results]

    def _full_launch(self) -> Launch | None:
        """Launch that reduces partial sums once they fill one, so that they are freed: at width 3456 each has 5 MB."""
        most = LARGEST_COUNT["reduce"]
        if len(self._partial) < most:
            return None
        ready, self._partial = self._partial[:most], self._partial[most:]
        return _reduce(ready)

    def reduce(self, norm: NormGradient | None) -> tuple[Launch, ...]:
        """Launches that reduce the remaining partial sums and those of `norm`. Call `stages` first."""
        left = [*self._partial, *self._summed_up(None if norm is None else norm.gradient, _PRE_NORM)]
        most = LARGEST_COUNT["reduce"]
        return tuple(_reduce(left[start : start + most]) for start in range(0, len(left), most))

    # The gradients of arguments.

    def norm(self) -> NormGradient | None:
        """The gradient through the norm before the first linear; None without a norm."""
        stage = self.shape.stages[0]
        if stage.before is None:
            return None
        plain, pairs = self._shares("x")
        spec = shapes.backward_before(stage, carried=bool(plain or pairs))
        several = self._products("x", "residual_grad", "x.dtype") if len(plain) + 2 * len(pairs) > 1 else None
        residual_grad = "residual_grad" if several is not None else plain[0] if plain else ""
        arguments = {
            "grad": "grad",
            "residual_grad_in": residual_grad,
            "x": "x",
            "mean": "pre_mean",
            "rstd": "pre_rstd",
        }
        gradient = launch(spec, {**arguments, **_PRE_NORM}, {"dx": "dx", **_partial_sums(_PRE_NORM)})
        return NormGradient(several, gradient)

    def x(self) -> Launch | None:
        """Launch that adds x's gradients, if the first linear's is not the only one and no norm's kernel adds them."""
        return self._products("x", "dx", "x_dtype", ["grad"]) if self.dx(0) is InputGradient.LAST else None

    def others(self) -> tuple[OtherGradient, ...]:
        """Gradients of the arguments that stages multiply by or add."""
        return tuple(self._other(name) for name in self.shape.others)

    def _other(self, name: str) -> OtherGradient:
        plain, pairs = self._shares(name)
        if len(plain) == 1 and not pairs:
            return OtherGradient(name, self.position(name), None, plain[0])
        return OtherGradient(name, self.position(name), self._products(name, f"d{name}", f"{name}_dtype"), "")

    def _shares(self, argument: str) -> tuple[list[str], list[tuple[str, str, str | None]]]:
        """Terms of an argument's gradient: gradients of sums, and (gradient, product, bias) to be multiplied."""
        plain: list[str] = []
        pairs: list[tuple[str, str, str | None]] = []
        for index, stage in enumerate(self.shape.stages):
            s = self.names.suffix(index)
            if stage.residual == argument:
                plain += self._sum_gradient(index)
            if stage.times == argument:
                bias = f"bias{s}" if stage.bias else None
                pairs += [(part, f"y{s}", bias) for part in self._sum_gradient(index)]
        return plain, pairs

    def _sum_gradient(self, index: int) -> list[str]:
        """The matrices that add up to the gradient of a stage's sum."""
        s, residual_grad = self.names.suffix(index), self._residual_grad(index)
        if residual_grad is None or not self.shape.leaves_sum(index):
            return [f"dsum{s}"]
        return [f"grad{s}", residual_grad]

    def _products(self, argument: str, target: str, dtype: str, plain: Sequence[str] = ()) -> Launch:
        """Launch that writes `target`, the sum of an argument's shares and of the matrices `plain`."""
        shares, pairs = self._shares(argument)
        terms = [*plain, *shares]
        spec = Products(argument_width(self.shape, argument), len(terms), tuple(bias is not None for *_, bias in pairs))
        factors = [name for pair in pairs for name in pair if name is not None]
        return Launch(spec, (*terms, *factors, dtype), (target,))


_PRE_NORM = {"weight": "pre_norm_weight", "bias": "pre_norm_bias"}


def argument_width(shape: ChainShape, argument: str) -> int:
    """Number of columns of an argument that stages multiply by or add."""

    def reads(stage: StageShape) -> bool:
        return argument in (stage.times, stage.residual)

    return next(stage.n for stage in shape.stages if reads(stage))


def _partial_sums(vectors: dict[str, str]) -> dict[str, str]:
    return {f"d{key}": f"{vector}_sums" for key, vector in vectors.items()}


def _reduce(vectors: Sequence[str]) -> Launch:
    """Launch that reduces partial sums to the gradients of these vectors, each in the vector's dtype."""
    arguments = [argument for vector in vectors for argument in (f"{vector}_sums", f"{vector}.dtype")]
    return Launch(Reduce(len(vectors)), tuple(arguments), tuple(f"d{vector}" for vector in vectors))
