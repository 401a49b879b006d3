"""The names in a chain's text, and its statements: calls of kernels and FP8 products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_shapes import ChainShape
from loka.codegen.chains.static_operands import input_kernel
from loka.codegen.modules.gemm_calls import gemm_call
from loka.codegen.modules.linear_recipes import SiteRecipe
from loka.codegen.text.layout import Code, call, lay_out
from loka.errors import LokaError
from loka.kernels.fused.cast_transpose.matrix_spec import Reduce
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.rendering import AnySpec
from loka.numerics.enums import Gemm
from loka.templating.wrap import WIDTH

INDENT = 8
_COPIES = (
    ("values", "fp8"),
    ("transposed", "transposed"),
    ("scale", "scale"),
)  # results of `CastTranspose`, and their names


class ChainKernels:
    """The kernels that a text calls, each once, in order."""

    def __init__(self) -> None:
        self._specs: dict[AnySpec, None] = {}

    def call(self, spec: AnySpec, arguments: Sequence[str]) -> Code:
        """`fused.NAME(arguments)`."""
        self._specs.setdefault(spec)
        return call(f"fused.{spec.function}", [Code(argument) for argument in arguments])

    def specs(self) -> tuple[AnySpec, ...]:
        """All that were called."""
        return tuple(self._specs)


class ChainNames:
    """What a chain's function calls its arguments and intermediate results; stages are told apart by number."""

    def __init__(self, shape: ChainShape) -> None:
        self._shape = shape

    @property
    def result(self) -> str:
        """What forward returns."""
        stage = self._shape.stages[-1]
        return "out" if stage.followed else f"y{self.suffix(len(self._shape.stages) - 1)}"

    def suffix(self, index: int) -> str:
        """ "_1" of the second stage; "" where there is one stage alone."""
        return f"_{index}" if len(self._shape.stages) > 1 else ""

    def hidden(self, index: int) -> str:
        """The input of a linear that runs in the model's dtype: what the kernel before it made, or a plain product."""
        if index and not self._shape.stages[index - 1].followed:
            return f"y{self.suffix(index - 1)}"
        return f"h{self.suffix(index)}"

    def quantised(self, operand: str, index: int, frozen: bool = False) -> dict[str, str]:
        """The results of a kernel that quantises; frozen weights and a wgrad that is kept need no transposed copies."""
        s = self.suffix(index)
        no_copy = frozen or (operand == "x" and self._shape.stages[index].keeps_wgrad)
        largest = "_" if no_copy else f"{operand}_largest{s}"
        return {"values": f"{operand}_fp8{s}", "scale": f"{operand}_scale{s}", "largest": largest}

    def scaled(self, operand: str, index: int) -> dict[str, str]:
        """What a kernel that quantises an operand under a known scale is given."""
        s = self.suffix(index)
        return {"scale": f"{operand}_scale{s}", "record": f"{operand}_record{s}"}

    def both_copies(self, operand: str, index: int) -> dict[str, str]:
        """The results of a kernel that makes an operand as it is and transposed; a weight's scale is one of them."""
        s = self.suffix(index)
        return {name: f"{operand}_{kind}{s}" for name, kind in _COPIES}

    def plain_input(self, index: int) -> str:
        """A linear's input in the model's dtype, where wgrad needs it so."""
        if index == 0:
            return "x"
        return self.sum(index - 1) if self._shape.stages[index - 1].summed else f"y{self.suffix(index - 1)}"

    def after(self, index: int) -> dict[str, str]:
        """The parameters of the kernel behind a linear."""
        s = self.suffix(index)
        return {"add": f"bias{s}", "weight": f"norm_weight{s}", "bias": f"norm_bias{s}"}

    def sum(self, index: int) -> str:
        """What a stage's product and residual came to."""
        return f"sum{self.suffix(index)}"

    def source(self, name: str | int | None, x: str = "x") -> str:
        """What a stage multiplies by or adds; `x` is what the chain's input is called here."""
        return self.sum(name) if isinstance(name, int) else x if name == "x" else str(name)

    @property
    def sums_dtype(self) -> str:
        """The dtype of sums and products with arguments, as torch would find it."""
        found = "dtype"
        used = dict.fromkeys(name for stage in self._shape.stages for name in (stage.times, stage.residual))
        for name in used:
            found = f"torch.promote_types({found}, {name}.dtype)" if isinstance(name, str) else found
        return found

    def vectors(self, index: int) -> list[str]:
        """A stage's bias and the parameters of its norm."""
        stage, names = self._shape.stages[index], self.after(index)
        norm = stage.after
        there = (stage.bias, norm is not None and norm.weight, norm is not None and norm.bias)
        return [names[key] for key, present in zip(("add", "weight", "bias"), there, strict=True) if present]

    def pre_vectors(self) -> list[str]:
        """The parameters of the norm before the first linear."""
        norm = self._shape.stages[0].before
        there = (
            ("pre_norm_weight", norm is not None and norm.weight),
            ("pre_norm_bias", norm is not None and norm.bias),
        )
        return [name for name, present in there if present]

    def tensors(self) -> list[str]:
        """forward's tensors."""
        found = ["x", *self._shape.others, *self.pre_vectors()]
        for index in range(len(self._shape.stages)):
            found += [f"weight{self.suffix(index)}", *self.vectors(index)]
            found += self.known(index)
        return found

    def known(self, index: int) -> list[str]:
        """The known scales of a stage, each with its record."""
        if not self._shape.known:
            return []
        return [name for operand in ("x", "dy") for name in self.scaled(operand, index).values()]

    def records(self) -> list[str]:
        """The records that backward adds to."""
        stages = range(len(self._shape.stages)) if self._shape.known else ()
        return [self.scaled("dy", index)["record"] for index in stages]

    def frozen_tensors(self) -> list[str]:
        """The frozen function's tensors: each FP8 weight comes with its scales."""
        found: list[str] = []
        of_gradients = {name for index in range(len(self._shape.stages)) for name in self.scaled("dy", index).values()}
        for name in self.tensors():
            if name in of_gradients:
                continue
            is_weight = name.startswith("weight") and self._shape.fp8
            found += [name, name.replace("weight", "scale", 1)] if is_weight else [name]
        return found

    def ticks(self) -> list[str]:
        """The numbers under which FP8 GEMMs count."""
        return (
            [f"counter_id{self.suffix(index)}" for index in range(len(self._shape.stages))] if self._shape.fp8 else []
        )

    def saved(self) -> list[str]:
        """What forward keeps for backward."""
        found: list[str] = []
        if self._shape.stages[0].before is not None:
            spec = shapes.backward_before(self._shape.stages[0])
            statistics = [f"pre_{name}" for name in spec.parameters if name in ("mean", "rstd")]
            found += ["x", *self.pre_vectors(), *statistics]
        for index, stage in enumerate(self._shape.stages):
            s = self.suffix(index)
            if self._shape.known:
                found += self._saved_known(index)
            elif self._shape.fp8:
                kept = stage.keeps_wgrad
                found += [self.plain_input(index)] if kept else self.quantised("x", index).values()
                found += self.quantised("weight", index).values()
            else:
                found += [self.hidden(index), f"weight{s}"]
            found += [f"y{s}"] if stage.times is not None or (stage.bent and not stage.summed) else []
            found += [self.sum(index)] if stage.bent and stage.summed else []
            found += [stage.times] if stage.times is not None else []
            found += self.vectors(index)
            spec_after = shapes.backward_after(stage, self._shape.fp8)
            parameters = spec_after.parameters if spec_after is not None else ()
            found += [f"{name}{s}" for name in parameters if name in ("mean", "rstd")]
        return list(dict.fromkeys(found))

    def _saved_known(self, index: int) -> list[str]:
        """The operands of a stage under known scales; what has a transposed copy already is read in that alone."""
        s, kept = self.suffix(index), self._shape.stages[index].keeps_wgrad
        x = "x_transposed" if "transposed" in input_kernel(self._shape, index).results else "x_fp8"
        operands = [self.plain_input(index)] if kept else [f"{x}{s}", f"x_scale{s}"]
        return [*operands, f"weight_transposed{s}", f"weight_scale{s}", f"dy_scale{s}"]

    def kept_dtypes(self) -> list[tuple[str, str]]:
        """The dtypes that backward cannot read off what is saved: where forward finds each, its name in backward."""
        found = []
        named = any("x" in (stage.times, stage.residual) for stage in self._shape.stages)
        if self._shape.fp8 and (len(self._shape.stages) > 1 or self._shape.stages[0].before is not None or named):
            found.append(("dtype", "dtype"))
        if self._shape.stages[0].before is None:
            found.append(("x.dtype", "x_dtype"))
        found += [(f"{other}.dtype", f"{other}_dtype") for other in self._shape.others]
        if self._shape.fp8:
            suffixes = [self.suffix(index) for index in range(len(self._shape.stages))]
            found += [(f"weight{s}.dtype", f"weight_dtype{s}") for s in suffixes]
        return found


def statement(
    kernels: ChainKernels, spec: AnySpec, arguments: Mapping[str, str], results: Mapping[str, str], indent: int
) -> list[str]:
    """`results = fused.kernel(arguments)`, both by the names that the kernel has for them."""
    parameters = list(spec.parameters)
    if isinstance(spec, NormForward) and spec.takes_dtype:
        parameters.append("dtype")
    values = kernels.call(spec, [arguments[name] for name in parameters])
    return assigned([results[name] for name in spec.results], values, indent)


def reduced(kernels: ChainKernels, sums: Sequence[tuple[str, str]], indent: int) -> list[str]:
    """Sums of partial sums in one launch; each stands with the vector whose gradient it is, in whose dtype."""
    arguments = [argument for partial, vector in sums for argument in (partial, f"{vector}.dtype")]
    value = kernels.call(Reduce(len(sums)), arguments)
    return assigned([f"d{vector}" for _, vector in sums], value, indent)


def assigned(targets: Sequence[str], value: Code, indent: int) -> list[str]:
    """`a, b = value`; where that would open the targets instead of the call, the value gets a name first."""
    before = ", ".join(targets)
    if indent + len(before) + len(" = ") + len(value.text) <= WIDTH:
        return lay_out(f"{before} = ", value, "", indent).split("\n")
    return [*lay_out("results = ", value, "", indent).split("\n"), *unpacked(targets, "results", indent)]


def unpacked(targets: Sequence[str], source: str, indent: int) -> list[str]:
    """`a, b = source`, one target a line where they are many."""
    margin = " " * indent
    if len(targets) == 1:
        return [f"{margin}({targets[0]},) = {source}"]
    line = f"{margin}{', '.join(targets)} = {source}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{margin}(", *(f"{margin}    {target}," for target in targets), f"{margin}) = {source}"]


def deleted(names: Sequence[str], indent: int) -> list[str]:
    """`del` of the names, in as many lines as it takes; none without names."""
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(f", {name}") <= WIDTH:
            lines[-1] += f", {name}"
        else:
            lines.append(f"{' ' * indent}del {name}")
    return lines


def product(
    recipe: SiteRecipe,
    gemm: Gemm,
    operands: Sequence[str],
    result: str,
    dtype: str,
    counter_id: str,
    indent: int,
    bias: str | None = None,
) -> list[str]:
    """`result = ` the FP8 product; of the scales of a transposed tensorwise operand the first is all."""
    found = dict(recipe.items())[gemm]
    if found is None:
        raise LokaError(f"a chain's {gemm} has no recipe. This is a fault in LoKA: please report it.")
    texts = list(operands)
    for place, operand in enumerate(found.operands):
        if operand.reads_first_scale:
            texts[2 * place + 1] += "[:1]"
    value = gemm_call(gemm, found, texts, dtype, counter_id, bias)
    return lay_out(f"{result} = ", value, "", indent).split("\n")
