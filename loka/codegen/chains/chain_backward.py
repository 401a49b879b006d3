"""The backward of a chain, as straight-line text: stage by stage from the last to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_names import (
    INDENT,
    ChainKernels,
    ChainNames,
    assigned,
    deleted,
    product,
    reduced,
    statement,
    unpacked,
)
from loka.codegen.chains.chain_shapes import ChainShape, StageShape
from loka.codegen.chains.static_operands import gradient_kernel, input_kernel, under
from loka.kernels.fused.cast_transpose.matrix_spec import LARGEST_COUNT, Products, RequantizeTranspose, Transpose
from loka.kernels.fused.rendering import AnySpec
from loka.numerics.enums import Gemm
from loka.templating.wrap import WIDTH


def backward_lines(shape: ChainShape, kernels: ChainKernels) -> list[str]:
    """The body of backward, which is given `grad`."""
    return _Backward(shape, kernels).lines


class _Backward:
    """Writes the lines; partial sums are gathered on the way, and added up in the end."""

    def __init__(self, shape: ChainShape, kernels: ChainKernels) -> None:
        self._shape, self._kernels = shape, kernels
        self._names = ChainNames(shape)
        self._inputs = self._names.tensors()
        self._sums: list[tuple[str, str]] = []  # a partial sum, and the vector whose gradient it is
        self._known: dict[str, str] = {}  # gradients that are no partial sums
        self.lines: list[str] = []
        self._write()

    def _write(self) -> None:
        self._unpack()
        weights = [f"weight{self._names.suffix(index)}" for index in range(len(self._shape.stages))]
        none = [*([] if self._ends_with_x else ["dx"]), *(f"d{name}" for name in (*self._shape.others, *weights))]
        for names in _in_lines(none):
            self._add(f"{' = '.join(names)} = None")
        for index in reversed(range(len(self._shape.stages))):
            if self._shape.stages[index].keeps_wgrad:
                self._wgrad_kept(index)
            elif self._shape.known:
                self._known_stage(index)
            else:
                (self._fp8_stage if self._shape.fp8 else self._plain_stage)(index)
            if index or self._ends_with_products:
                self._delete(index)
            self._reduce(LARGEST_COUNT["reduce"])
        if self._ends_with_x:
            self._before(INDENT)
        self._reduce(1)
        if self._ends_with_products:
            self._add(self._needs("x"))
            if self._shape.known or not self._shape.stages[0].keeps_wgrad:
                self._dgrad(0, "grad", "dtype", INDENT + 4)  # after the copies for wgrad are gone
            self._products("x", "dx", "x_dtype", ["grad"], INDENT + 4)
        for other in self._shape.others:
            self._other(other)
        nothing = ["None"] * (1 + len(self._names.ticks()))
        known = {name for index in range(len(self._shape.stages)) for name in self._names.known(index)}
        self._return([*("None" if name in known else f"d{name}" for name in self._inputs), *nothing])

    def _delete(self, index: int) -> None:
        """`del` of the matrices that no stage before this one reads."""
        stage, s = self._shape.stages[index], self._names.suffix(index)
        saved = [f"x_fp8{s}", f"weight_fp8{s}", self._names.hidden(index), self._names.sum(index)]
        saved += [f"x_transposed{s}", *([f"weight_transposed{s}"] if index else [])]  # of known scales
        saved += [f"y{s}"] if stage.times is None else []  # a factor's gradient reads the product in the end
        reader = self._shape.reader(index)
        done = reader is not None and self._shape.stages[reader].times is None
        carried = [f"dsum{self._names.suffix(reader)}"] if reader is not None and done else []
        names = [name for name in saved if name in self._names.saved()] + carried + self._made(index)
        self.lines += deleted(names, INDENT)

    def _made(self, index: int) -> list[str]:
        """The matrices that a stage makes for itself alone, and always."""
        stage = self._shape.stages[index]
        if not self._shape.fp8:
            return ["dy"] if shapes.backward_after(stage, quantise=False) is not None else []
        last = not index and not self._ends_with_x  # its dgrad comes in the end
        if self._shape.known:
            transposed = not stage.keeps_wgrad and "transposed" in gradient_kernel(self._shape, index).results
            return [*([] if last else ["dy_fp8"]), *(["dy_transposed"] if transposed else [])]
        dgrad = [] if last else ["dy_fp8", "weight_transposed"]
        return dgrad if stage.keeps_wgrad else [*dgrad, "dy_transposed", "x_transposed"]

    @property
    def _ends_with_x(self) -> bool:
        """Whether the input's gradient is always computed: a norm with parameters before the first linear needs it."""
        return bool(self._names.pre_vectors())

    @property
    def _ends_with_products(self) -> bool:
        """Whether the input's gradient is that through the first linear, and shares of sums and products beside it."""
        return self._shape.stages[0].before is None and any(self._shares("x"))

    def _reduce(self, least: int) -> None:
        """Add up the partial sums so far, as many in a launch as there can be, while there are at least so many.

        Of rows of 3456 a partial sum is 5 MB: they are not kept longer than it takes to fill a launch.
        """
        while len(self._sums) >= least:
            some, self._sums = self._sums[: LARGEST_COUNT["reduce"]], self._sums[LARGEST_COUNT["reduce"] :]
            self.lines += reduced(self._kernels, some, INDENT)
            if least > 1:
                self.lines += deleted([partial for partial, _ in some], INDENT)

    def _add(self, line: str, indent: int = INDENT) -> None:
        self.lines.append(" " * indent + line)

    def _say(self, index: int) -> None:
        if len(self._shape.stages) > 1:
            self._add(f"# Linear {index}.")

    def _unpack(self) -> None:
        self.lines += unpacked(self._names.saved(), "dispatch.saved_tensors(ctx)", INDENT)
        dtypes = [name for _, name in self._names.kept_dtypes()]
        if dtypes:
            self.lines += unpacked(dtypes, "ctx.dtypes", INDENT)
        if self._names.records():
            self.lines += unpacked(self._names.records(), "ctx.records", INDENT)
        ticks = self._names.ticks()
        if len(ticks) > 1:
            self.lines += unpacked(ticks, "ctx.counter_ids", INDENT)

    def _return(self, values: Sequence[str]) -> None:
        line = f"return {', '.join(values)}"
        if INDENT + len(line) <= WIDTH:
            self._add(line)
            return
        self._add("return (")
        for value in values:
            self._add(f"{value},", INDENT + 4)
        self._add(")")

    def _counter_id(self, index: int) -> str:
        return "ctx.counter_id" if len(self._shape.stages) == 1 else f"counter_id{self._names.suffix(index)}"

    def _needs(self, name: str) -> str:
        return f"if ctx.needs_input_grad[{self._inputs.index(name)}]:"

    def _through_after(self, index: int, stage: StageShape, results: dict[str, str]) -> bool:
        """From the gradient of a stage's result to that of its product; False where no kernel is needed for that."""
        reader = self._shape.reader(index)
        carry = not self._shape.leaves_sum(index)
        spec: AnySpec | None = shapes.backward_after(stage, self._shape.fp8, carried=reader is not None, carry=carry)
        if spec is None:
            return False
        spec = gradient_kernel(self._shape, index) if self._shape.known else spec
        s, vectors = self._names.suffix(index), self._names.after(index)
        known = {**vectors, "mean": f"mean{s}", "rstd": f"rstd{s}", "times": str(stage.times)}
        known |= {"carried": f"dsum{self._names.suffix(reader)}"} if reader is not None else {}
        x = self._names.sum(index) if stage.summed else f"y{s}"
        arguments = {"grad": "grad", "x": x, **known} if "grad" in spec.parameters else {"x": "grad"}
        arguments |= self._names.scaled("dy", index)
        sums = {f"d{key}": f"{vector}_sums" for key, vector in vectors.items()}
        self.lines += statement(self._kernels, spec, arguments, {**results, **sums, "dsum": f"dsum{s}"}, INDENT)
        if not carry:
            self._add(f"grad{s} = grad  # with {known['carried']} the gradient of {self._names.sum(index)}")
        elif stage.summed and "dsum" not in spec.results:
            self._add(f"dsum{s} = grad")
        else:
            self._add("del grad")
        self._sums += [(sums[f"d{key}"], vectors[key]) for key in vectors if f"d{key}" in spec.results]
        return True

    def _fp8_stage(self, index: int) -> None:
        stage, s = self._shape.stages[index], self._names.suffix(index)
        self._say(index)
        self._through_after(index, stage, {"values": "dy_fp8", "scale": "dy_scale", "largest": "dy_largest"})
        if index or self._ends_with_x:
            self._requantize_transpose(index, ("dy", "x", "weight"), INDENT)
            self._dgrad(index, "grad", "dtype", INDENT)
        else:
            self._add(self._needs("x"))
            self._requantize_transpose(index, ("dy", "x", "weight"), INDENT + 4)
            if stage.before is not None:
                self._dgrad(index, "grad", "dtype", INDENT + 4)
                self._before(INDENT + 4)
            elif not self._ends_with_products:
                self._dgrad(index, "dx", "x_dtype", INDENT + 4)
            self._add("else:")
            self._requantize_transpose(index, ("dy", "x"), INDENT + 4)
        self._add(self._needs(f"weight{s}"))
        operands = ("dy_transposed", "dy_scale_t", "x_transposed", "x_scale_t")
        counter_id, dtype = f"{self._counter_id(index)} + 2", f"weight_dtype{s}"
        self.lines += product(stage.recipe, Gemm.WGRAD, operands, f"dweight{s}", dtype, counter_id, INDENT + 4)
        self._cut(index, f"dweight{s}", INDENT + 4)

    def _cut(self, index: int, target: str, indent: int) -> None:
        """Leave out the columns that a kernel wrote behind an operand."""
        if self._shape.stages[index].given:
            self._add(f"{target} = {target}[:, :{self._shape.stages[index].given}]", indent)

    def _dgrad(self, index: int, target: str, dtype: str, indent: int) -> None:
        """The gradient of a linear's input from FP8 copies."""
        s = self._names.suffix(index)
        operands = ("dy_fp8", "dy_scale", "weight_transposed", "weight_scale_t")
        if self._shape.known:
            operands = ("dy_fp8", f"dy_scale{s}", f"weight_transposed{s}", f"weight_scale{s}")
        recipe, counter_id = self._shape.stages[index].recipe, f"{self._counter_id(index)} + 1"
        self.lines += product(recipe, Gemm.DGRAD, operands, target, dtype, counter_id, indent)
        self._cut(index, target, indent)

    def _known_stage(self, index: int) -> None:
        """A stage under known scales: what has no transposed copy yet is transposed for wgrad alone."""
        stage, s = self._shape.stages[index], self._names.suffix(index)
        self._say(index)
        self._through_after(index, stage, {"values": "dy_fp8", "transposed": "dy_transposed"})
        self._known_dgrad(index)
        self._add(self._needs(f"weight{s}"))
        made = gradient_kernel(self._shape, index).results, input_kernel(self._shape, index).results
        found = {} if "transposed" in made[0] else {"dy_fp8": "dy_transposed"}
        found |= {} if "transposed" in made[1] else {f"x_fp8{s}": f"x_transposed{s}"}
        if found:
            copies = self._kernels.call(Transpose(len(found)), list(found))
            self.lines += assigned(list(found.values()), copies, INDENT + 4)
        operands = ("dy_transposed", f"dy_scale{s}", f"x_transposed{s}", f"x_scale{s}")
        counter_id, dtype = f"{self._counter_id(index)} + 2", f"weight_dtype{s}"
        self.lines += product(stage.recipe, Gemm.WGRAD, operands, f"dweight{s}", dtype, counter_id, INDENT + 4)
        if index or self._ends_with_products:
            self.lines += deleted(list(found.values()), INDENT + 4)

    def _known_dgrad(self, index: int) -> None:
        """dgrad, and behind the first stage what leads to x's gradient, unless that comes in the end."""
        if index or self._ends_with_x:
            self._dgrad(index, "grad", "dtype", INDENT)
        elif not self._ends_with_products:
            self._add(self._needs("x"))
            if self._shape.stages[0].before is not None:
                self._dgrad(index, "grad", "dtype", INDENT + 4)
                self._before(INDENT + 4)
            else:
                self._dgrad(index, "dx", "x_dtype", INDENT + 4)

    def _wgrad_kept(self, index: int) -> None:
        """A stage whose wgrad takes both operands in the model's dtype; dgrad quantises the gradient."""
        stage, s = self._shape.stages[index], self._names.suffix(index)
        self._say(index)
        self._add(self._needs(f"weight{s}"))
        x = f"{self._names.plain_input(index)}.to(grad.dtype)"
        self._add(f"dweight{s} = (grad.t() @ {x}).to(weight_dtype{s})", INDENT + 4)
        if self._shape.known:
            scaled = self._names.scaled("dy", index)
            spec = under(shapes.quantiser(stage.n), stage.dy)
            self.lines += statement(self._kernels, spec, {"x": "grad", **scaled}, {"values": "dy_fp8"}, INDENT)
            self._known_dgrad(index)
            return
        indent = INDENT if index else INDENT + 4
        if not index:
            self._add(self._needs("x"))
        results = {"values": "dy_fp8", "scale": "dy_scale", "largest": "_"}
        self.lines += statement(self._kernels, shapes.quantiser(stage.n), {"x": "grad"}, results, indent)
        arguments = {"values": f"weight_fp8{s}", "scale": f"weight_scale{s}", "scale_max": f"weight_largest{s}"}
        results = {"transposed": "weight_transposed", "scale_t": "weight_scale_t"}
        self.lines += statement(self._kernels, RequantizeTranspose(1), arguments, results, indent)
        target, dtype = ("grad", "dtype") if index or self._ends_with_products else ("dx", "x_dtype")
        self._dgrad(index, target, dtype, indent)

    def _requantize_transpose(self, index: int, operands: Sequence[str], indent: int) -> None:
        """The transposed copies of a stage's operands, in one launch."""
        s = self._names.suffix(index)
        arguments: dict[str, str] = {}
        results: dict[str, str] = {}
        for place, operand in enumerate(operands):
            own = "" if operand == "dy" else s
            for name, values in (("values", "fp8"), ("scale", "scale"), ("scale_max", "largest")):
                arguments[f"{name}_{place}"] = f"{operand}_{values}{own}"
            for name in ("transposed", "scale_t"):
                results[f"{name}_{place}"] = f"{operand}_{name}"
        self.lines += statement(self._kernels, RequantizeTranspose(len(operands)), arguments, results, indent)

    def _plain_stage(self, index: int) -> None:
        stage, s = self._shape.stages[index], self._names.suffix(index)
        self._say(index)
        dy = "dy" if self._through_after(index, stage, {"dx": "dy"}) else "grad"
        if stage.bias and not stage.followed:
            self._add(f"dbias{s} = {dy}.sum(0).to(bias{s}.dtype)")
        self._add(self._needs(f"weight{s}"))
        self._add(f"dweight{s} = ({dy}.t() @ {self._names.hidden(index)}).to(weight{s}.dtype)", INDENT + 4)
        if index or self._ends_with_x:
            self._add(f"grad = {dy} @ weight{s}.to({dy}.dtype)")
            return
        self._add(self._needs("x"))
        if stage.before is None:
            self._add(f"dx = ({dy} @ weight{s}.to({dy}.dtype)).to(x_dtype)", INDENT + 4)
        else:
            self._add(f"grad = {dy} @ weight{s}.to({dy}.dtype)", INDENT + 4)
            self._before(INDENT + 4)

    def _before(self, indent: int) -> None:
        """Through the norm before the first linear."""
        spec = shapes.backward_before(self._shape.stages[0], carried=any(self._shares("x")))
        carried = self._carried(indent) if spec.carried else ""
        vectors = {"weight": "pre_norm_weight", "bias": "pre_norm_bias"}
        arguments = {"grad": "grad", "carried": carried, "x": "x", "mean": "pre_mean", "rstd": "pre_rstd", **vectors}
        sums = {f"d{key}": f"{vector}_sums" for key, vector in vectors.items()}
        self.lines += statement(self._kernels, spec, arguments, {"dx": "dx", **sums}, indent)
        self._add("dx = dx.to(x.dtype)", indent)
        self._sums += [(sums[f"d{key}"], vectors[key]) for key in vectors if f"d{key}" in spec.results]

    def _shares(self, argument: str) -> tuple[list[str], list[tuple[str, str, str | None]]]:
        """What stages add to an argument's gradient: sums' gradients, and those with the product that they go with."""
        plain: list[str] = []
        pairs: list[tuple[str, str, str | None]] = []
        for index, stage in enumerate(self._shape.stages):
            s = self._names.suffix(index)
            if stage.residual == argument:
                plain += self._sum_gradient(index)
            if stage.times == argument:
                bias = f"bias{s}" if stage.bias else None
                pairs += [(part, f"y{s}", bias) for part in self._sum_gradient(index)]
        return plain, pairs

    def _sum_gradient(self, index: int) -> list[str]:
        """The matrices that the gradient of a stage's sum is the sum of."""
        s = self._names.suffix(index)
        reader = self._shape.reader(index)
        if reader is None or not self._shape.leaves_sum(index):
            return [f"dsum{s}"]
        return [f"grad{s}", f"dsum{self._names.suffix(reader)}"]

    def _products(self, argument: str, target: str, dtype: str, plain: Sequence[str], indent: int) -> None:
        """`target` as the sum of an argument's shares and of `plain` matrices."""
        shares, pairs = self._shares(argument)
        terms = [*plain, *shares]
        width = next(stage.n for stage in self._shape.stages if argument in (stage.times, stage.residual))
        spec = Products(width, len(terms), tuple(bias is not None for *_, bias in pairs))
        arguments = [*terms, *(name for pair in pairs for name in pair if name is not None), dtype]
        self.lines += assigned([target], self._kernels.call(spec, arguments), indent)

    def _carried(self, indent: int) -> str:
        """The gradient of x that does not go through the norm before the first linear."""
        plain, pairs = self._shares("x")
        if len(plain) == 1 and not pairs:
            return plain[0]
        self._products("x", "carried", "x.dtype", [], indent)
        return "carried"

    def _other(self, name: str) -> None:
        """The gradient of an argument that stages multiply by or add."""
        plain, pairs = self._shares(name)
        self._add(self._needs(name))
        if len(plain) == 1 and not pairs:
            self._add(f"d{name} = {plain[0]}.to({name}_dtype)", INDENT + 4)
        else:
            self._products(name, f"d{name}", f"{name}_dtype", [], INDENT + 4)


def _in_lines(names: Sequence[str]) -> Iterator[list[str]]:
    """The names in groups, each of which `a = b = None` takes a line for."""
    line: list[str] = []
    for name in names:
        if line and INDENT + len(" = ".join([*line, name, "None"])) > WIDTH:
            yield line
            line = []
        line.append(name)
    yield line
