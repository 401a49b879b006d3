"""Chains as text: one autograd function for each shape of chain, its wrapper, and its form for frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_backward import backward_lines
from loka.codegen.chains.chain_names import INDENT, ChainKernels, ChainNames, deleted, product, statement
from loka.codegen.chains.chain_shapes import ChainShape, NormShape, StageShape
from loka.codegen.chains.static_operands import both_copies, input_kernel, maximum, under
from loka.codegen.modules.linear_recipes import recipe_label
from loka.codegen.text.comments import wrapped
from loka.codegen.text.identifiers import Names, class_of
from loka.codegen.text.layout import Code, call, lay_out, literal
from loka.errors import LokaError
from loka.kernels.fused.norm.norm_spec import GATES
from loka.kernels.fused.rendering import AnySpec
from loka.numerics.enums import Gemm


@dataclass(frozen=True, slots=True)
class ChainView:
    """One autograd function and its wrapper, as templates/chain.py.j2 reads it."""

    function: str  # LayerNormLinearSiluE4m3X512x2048
    said: str
    forward_header: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    header: str
    docstring: str
    empty: tuple[str, ...]  # what is computed for a batch without rows
    body: tuple[str, ...]
    width: int  # of the result


@dataclass(frozen=True, slots=True)
class FrozenChainView:
    """The chain for weights that were quantised once, as templates/chain_frozen.py.j2 reads it."""

    header: str
    docstring: str
    body: tuple[str, ...]


class Chains:
    """The chains of one package and the kernels that they call, each once, in the order of their first uses."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._trained: dict[ChainShape, tuple[str, str]] = {}
        self._frozen: dict[ChainShape, str] = {}

    def function(self, shape: ChainShape, frozen: bool) -> str:
        """The wrapper's name in kernels.py for one more call."""
        if frozen:
            if shape not in self._frozen:
                self._frozen[shape] = self._names.unique(f"{shape.name}_frozen")
            return self._frozen[shape]
        if shape not in self._trained:
            name = self._names.unique(shape.name)
            self._trained[shape] = (name, self._names.unique(class_of(name)))
        return self._trained[shape][0]

    def views(self) -> tuple[ChainView, ...]:
        """Every chain for training that was asked for."""
        return tuple(_trained(shape, name, function) for shape, (name, function) in self._trained.items())

    def frozen_views(self) -> tuple[FrozenChainView, ...]:
        """Every chain for frozen weights that was asked for."""
        return tuple(_frozen(shape, name) for shape, name in self._frozen.items())

    @property
    def known(self) -> bool:
        """Whether any has known scales."""
        return any(shape.known for shape in (*self._trained, *self._frozen))

    def specs(self) -> tuple[AnySpec, ...]:
        """The kernels that the chains call."""
        kernels = ChainKernels()
        for shape in self._trained:
            _forward_lines(shape, kernels, frozen=False)
            backward_lines(shape, kernels)
        for shape in self._frozen:
            _forward_lines(shape, kernels, frozen=True)
        return kernels.specs()


def _trained(shape: ChainShape, name: str, function: str) -> ChainView:
    names = ChainNames(shape)
    typed = [Code("ctx: Any"), *(Code(f"{item}: Tensor") for item in names.tensors()), Code("dtype: torch.dtype")]
    ticks = [f"{counter_id}: int" for counter_id in names.ticks()]
    inputs = names.tensors()
    flat = [f"{item}.reshape(-1, {_width(shape, item)})" if item in shape.others else item for item in inputs[1:]]
    applied = call(f"{function}.apply", [Code(item) for item in ("rows", *flat, "dtype", *names.ticks())])
    return ChainView(
        function,
        wrapped(f"{_steps(shape)}. {_gemms(shape)}", INDENT // 2, first=3),
        lay_out("def ", call("forward", [*typed, *map(Code, ticks)]), " -> Tensor:", INDENT // 2),
        tuple(_forward_lines(shape, ChainKernels(), frozen=False)),
        tuple(backward_lines(shape, ChainKernels())),
        _header(name, inputs, names.ticks()),
        wrapped(_docstring(shape, "GEMMs count under their ticks." if shape.fp8 else ""), 4, first=3),
        tuple(_empty_lines(shape)),
        tuple(lay_out("y = ", applied, "", 4).split("\n")),
        shape.stages[-1].n,
    )


def _width(shape: ChainShape, other: str) -> int:
    """Columns of a matrix that stages multiply by or add."""
    return next(stage.n for stage in shape.stages if other in (stage.times, stage.residual))


def _frozen(shape: ChainShape, name: str) -> FrozenChainView:
    names = ChainNames(shape)
    return FrozenChainView(
        _header(name, names.frozen_tensors(), names.ticks()),
        wrapped(_docstring(shape, "It gives no gradients."), 4, first=3),
        (
            "    dtype = dispatch.output_dtype(x)",
            "    if x.numel() == 0:",
            f"        return x.new_zeros((*x.shape[:-1], {shape.stages[-1].n}), dtype=dtype)",
            *_forward_lines(shape, ChainKernels(), frozen=True),
        ),
    )


def _header(name: str, tensors: Sequence[str], ticks: Sequence[str]) -> str:
    typed = [Code(f"{item}: Tensor") for item in tensors] + [Code(f"{counter_id}: int") for counter_id in ticks]
    return lay_out("def ", call(name, typed), " -> Tensor:", 0)


def _steps(shape: ChainShape) -> str:
    return " -> ".join(shape.ops)


def _docstring(shape: ChainShape, last: str) -> str:
    sizes = ", ".join(
        f"weight{ChainNames(shape).suffix(i)} ({stage.n}, {stage.given or stage.k})"
        for i, stage in enumerate(shape.stages)
    )
    first, final = shape.stages[0].given or shape.stages[0].k, shape.stages[-1].n
    others = "".join(f"{other} (..., {_width(shape, other)}), " for other in shape.others)
    return f"{_steps(shape)}: x (..., {first}), {others}{sizes} -> (..., {final}). {last}".strip()


def _gemms(shape: ChainShape) -> str:
    """What the GEMMs run in, said once where all stages agree."""
    found = dict.fromkeys(recipe_label(stage.recipe.items()) for stage in shape.stages)
    return "; ".join(found) + "."


def _forward_lines(shape: ChainShape, kernels: ChainKernels, frozen: bool) -> list[str]:
    """The body of forward, or, of the frozen function, what comes after its empty batches."""
    indent = INDENT // 2 if frozen else INDENT
    lines = ["    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])"] if frozen else []
    lines += [f"    {other} = {other}.reshape(-1, {_width(shape, other)})" for other in shape.others if frozen]
    make = _fp8_stages if shape.fp8 else _plain_stages
    made = make(shape, kernels, frozen, "rows" if frozen else "x", indent)
    if any("sums_dtype" in line for line in made):
        lines.append(f"{' ' * indent}sums_dtype = {ChainNames(shape).sums_dtype}")
    lines += made
    names = ChainNames(shape)
    margin = " " * indent
    if frozen:
        whole = f"{names.result}.reshape(*x.shape[:-1], {shape.stages[-1].n})"
        return [*lines, f"{margin}return {names.result} if x.dim() == 2 else {whole}"]
    saved = call("ctx.save_for_backward", [Code(item) for item in names.saved()])
    lines += lay_out("", saved, "", indent).split("\n")
    dtypes, ticks = [source for source, _ in names.kept_dtypes()], names.ticks()
    if dtypes:
        kept = Code("(", tuple(map(Code, dtypes)), ")", comma=len(dtypes) == 1)
        lines += lay_out("ctx.dtypes = ", kept, "", indent).split("\n")
    if names.records():  # not saved: backward writes into them
        kept = Code("(", tuple(map(Code, names.records())), ")", comma=len(names.records()) == 1)
        lines += lay_out("ctx.records = ", kept, "", indent).split("\n")
    if len(ticks) == 1:
        lines.append(f"{margin}ctx.counter_id = counter_id")
    elif ticks:
        lines += lay_out("ctx.counter_ids = ", Code("(", tuple(map(Code, ticks)), ")"), "", indent).split("\n")
    return [*lines, f"{margin}return {names.result}"]


def _fp8_stages(shape: ChainShape, kernels: ChainKernels, frozen: bool, x: str, indent: int) -> list[str]:
    names, lines = ChainNames(shape), []
    lines += _first_operand(shape, kernels, frozen, x, indent)
    for index, stage in enumerate(shape.stages):
        s, last = names.suffix(index), index == len(shape.stages) - 1
        if not frozen:
            lines += _quantised_weight(shape, kernels, index, indent)
        weight = (f"weight{s}", f"scale{s}") if frozen else (f"weight_fp8{s}", f"weight_scale{s}")
        operands = (f"x_fp8{s}", f"x_scale{s}", *weight)
        bias = f"bias{s}.to(dtype)" if last and stage.bias and not stage.followed else None
        lines += product(stage.recipe, Gemm.FPROP, operands, f"y{s}", "dtype", f"counter_id{s}", indent, bias)
        if stage.followed or not last:
            after = shapes.forward_after(stage, not last, save=not frozen, keep=shape.keeps(index, frozen))
            spec: AnySpec = after if last else under(after, shape.stages[index + 1].x)
            if shape.known and not (last or frozen):
                spec = input_kernel(shape, index + 1)
            copies = (
                {**names.both_copies("x", index + 1), **names.quantised("x", index + 1, frozen)} if not last else {}
            )
            results = {**copies, "out": "out"}
            sums = {"times": names.source(stage.times, x), "residual": names.source(stage.residual, x)}
            lines += _after(kernels, spec, names, index, results, indent, sums if stage.summed else {})
        read = [
            f"x_fp8{s}",
            f"weight_fp8{s}",
            f"y{s}",
            *([names.sum(stage.residual)] if isinstance(stage.residual, int) else []),
        ]
        done = [name for name in read if name not in names.saved()]
        lines += deleted(done, indent) if not last and not frozen else []
    return lines


def _first_operand(shape: ChainShape, kernels: ChainKernels, frozen: bool, x: str, indent: int) -> list[str]:
    """The FP8 input of the first linear; under a known scale and without a norm its transposed copy comes with it."""
    names, stage = ChainNames(shape), shape.stages[0]
    before = {"x": x, "weight": "pre_norm_weight", "bias": "pre_norm_bias", **names.scaled("x", 0)}
    first: AnySpec = under(shapes.forward_before(stage, quantise=True, save=not frozen), stage.x)
    if shape.known and not frozen:
        first = input_kernel(shape, 0)
    copies = {**names.both_copies("x", 0), **names.quantised("x", 0, frozen)}
    results = {**copies, "mean": "pre_mean", "rstd": "pre_rstd"}
    return statement(kernels, first, before, results, indent)


def _quantised_weight(shape: ChainShape, kernels: ChainKernels, index: int, indent: int) -> list[str]:
    """A stage's weight in FP8; under one scale as it is and transposed, once its maximum is known."""
    names, stage, s = ChainNames(shape), shape.stages[index], ChainNames(shape).suffix(index)
    weight = {"x": f"weight{s}", "maxima": f"weight_maxima{s}"}
    if not shape.known:
        spec = shapes.quantiser(stage.k, stage.given)
        return statement(kernels, spec, weight, names.quantised("weight", index), indent)
    lines = statement(kernels, maximum(stage.k), weight, {"amax": f"weight_maxima{s}"}, indent)
    return [*lines, *statement(kernels, both_copies(stage.weight), weight, names.both_copies("weight", index), indent)]


def _plain_stages(shape: ChainShape, kernels: ChainKernels, frozen: bool, x: str, indent: int) -> list[str]:
    names, lines, margin = ChainNames(shape), [], " " * indent
    if shape.stages[0].before is None:
        lines.append(f"{margin}{names.hidden(0)} = {x}.to(dtype)")
    else:
        first = shapes.forward_before(shape.stages[0], quantise=False, save=not frozen)
        before = {"x": x, "weight": "pre_norm_weight", "bias": "pre_norm_bias", "dtype": "dtype"}
        results = {"out": names.hidden(0), "mean": "pre_mean", "rstd": "pre_rstd"}
        lines += statement(kernels, first, before, results, indent)
    for index, stage in enumerate(shape.stages):
        s, last = names.suffix(index), index == len(shape.stages) - 1
        bias = [f"bias{s}.to(dtype)"] if stage.bias and not stage.followed else []
        linear = call("torch.nn.functional.linear", map(Code, [names.hidden(index), f"weight{s}.to(dtype)", *bias]))
        lines += lay_out(f"y{s} = ", linear, "", indent).split("\n")
        if stage.followed:
            spec = shapes.forward_after(stage, quantise=False, save=not frozen)
            results = {"out": "out" if last else names.hidden(index + 1)}
            lines += _after(kernels, spec, names, index, results, indent, {})
    return lines


def _after(
    kernels: ChainKernels,
    spec: AnySpec,
    names: ChainNames,
    index: int,
    results: dict[str, str],
    indent: int,
    sums: dict[str, str],
) -> list[str]:
    """The kernel on a product; a plain one is told the dtype of its result. `sums` are its factor and its residual."""
    s = names.suffix(index)
    arguments = {**names.after(index), **sums, "x": f"y{s}", "dtype": "sums_dtype" if sums else "dtype"}
    arguments |= names.scaled("x", index + 1)
    results = {**results, "kept": names.sum(index), "mean": f"mean{s}", "rstd": f"rstd{s}"}
    return statement(kernels, spec, arguments, results, indent)


def _empty_lines(shape: ChainShape) -> list[str]:
    """The chain in torch's own operations, for a batch without rows."""
    steps: list[tuple[str, Callable[[str], Code]]] = []  # a name, and what it stands for, made of the one before
    for index in range(len(shape.stages)):
        steps += [("y", step) for step in _empty_steps(shape, index)]
        if shape.reader(index) is not None:
            steps[-1] = (ChainNames(shape).sum(index), steps[-1][1])
    lines: list[str] = []
    before = "x"
    for number, (target, step) in enumerate(steps):
        last = number == len(steps) - 1
        lines += lay_out("return " if last else f"{target} = ", step(before), "", INDENT).split("\n")
        before = target
    return lines


def _empty_steps(shape: ChainShape, index: int) -> list[Callable[[str], Code]]:
    """One stage of it."""
    names, stage = ChainNames(shape), shape.stages[index]
    s, steps = names.suffix(index), list[Callable[[str], Code]]()

    def step(function: str, arguments: list[Code]) -> None:
        steps.append(lambda y: call(f"torch.nn.functional.{function}", [Code(y), *arguments]))

    def norm_step(norm: NormShape, width: int, name: str, suffix: str) -> None:
        steps.append(lambda y: _norm_code(y, norm, width, name, suffix))

    if stage.before is not None:
        norm_step(stage.before, stage.k, "pre_norm", "")
    step("linear", [Code(f"weight{s}"), *([Code(f"bias{s}")] if stage.bias else [])])
    if stage.times is not None:
        steps.append(lambda y: Code(f"{y} * {names.source(stage.times)}"))
    if stage.residual is not None:
        steps.append(lambda y: Code(f"{y} + {names.source(stage.residual)}"))
    if stage.after is not None and stage.activation in GATES:
        steps.append(lambda y: _gate_code(y, stage, s))
        return steps
    if stage.after is not None:
        norm_step(stage.after, stage.n, "norm", s)
    if stage.activation is not None:
        step(stage.activation, [])
    return steps


def _gate_code(y: str, stage: StageShape, suffix: str) -> Code:
    """A product with the activation of its own norm, `y * torch.nn.functional.sigmoid(...)`."""
    if stage.after is None or stage.activation is None:
        raise LokaError("a gate stands without its norm. This is a fault in LoKA: please report it.")
    function = f"torch.nn.functional.{stage.activation.removeprefix('gate_')}"
    return call(f"{y} * {function}", [_norm_code(y, stage.after, stage.n, "norm", suffix)])


def _norm_code(y: str, norm: NormShape, width: int, name: str, suffix: str) -> Code:
    """A norm by torch's own function; that of blocks is an rms_norm between two changes of view."""
    if norm.kind == "block_norm":
        blocks = f"{y}.unflatten(-1, ({width // norm.block}, {norm.block}))"
        given = [Code(blocks), literal((norm.block,)), Code("None"), literal(norm.eps)]
        code = call("torch.nn.functional.rms_norm", given)
        return replace(code, close=code.close + ".flatten(-2)")
    arguments = [Code(y), literal((width,)), Code(f"{name}_weight{suffix}" if norm.weight else "None")]
    if norm.kind == "layer_norm":
        arguments.append(Code(f"{name}_bias{suffix}" if norm.bias else "None"))
    return call(f"torch.nn.functional.{norm.kind}", [*arguments, literal(norm.eps)])
