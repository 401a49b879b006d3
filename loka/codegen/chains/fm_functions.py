"""Mixing layers and joins as text: an autograd function and its wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.text.comments import wrapped
from loka.codegen.text.layout import Code, call, lay_out
from loka.kernels.fused.interaction.concat_norm_spec import ConcatNormForward, backward_of, part_names
from loka.kernels.fused.interaction.fm_spec import FmBackward, FmForward, FmSizes
from loka.templating.wrap import WIDTH

INDENT = 8
M = " " * INDENT


@dataclass(frozen=True, slots=True)
class FunctionView:
    """One autograd function and its wrapper, as templates/function.py.j2 reads it."""

    function: str  # Mix64x128To32X32
    said: str
    forward_header: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    header: str
    docstring: str
    body: tuple[str, ...]


def fm_view(sizes: FmSizes, passes: bool, name: str, function: str) -> FunctionView:
    """A mixing layer; where it `passes` x on, x's other gradient comes back with those of the products."""
    forward = FmForward(sizes)
    weights, results = forward.parameters[1:], (*forward.results, *(["x.view_as(x)"] if passes else []))
    sums = " and weighted sums of them" if sizes.made else ""
    handed = ", and x itself for what adds it" if passes else ""
    n, d, r, c = sizes.embeddings, sizes.dim, sizes.rank, sizes.made
    gives = f"(B, {n}, {r})" + (f", compress @ x (B, {c}, {d})" if c else "")
    return FunctionView(
        function,
        wrapped(f"All pairs of a sample's embeddings at low rank{sums}{handed}.", INDENT // 2, first=3),
        header("forward", ("x", *weights), "dtype: torch.dtype", len(results), method=True),
        (
            f"{M}samples = x.to(dtype)",
            *called(forward.results, forward.function, ["samples", *(f"{weight}.to(dtype)" for weight in weights)]),
            f"{M}ctx.save_for_backward(samples, {', '.join(weights)})",
            *([] if passes else [f"{M}ctx.x_dtype = x.dtype"]),
            f"{M}return {', '.join(results)}",
        ),
        _mix_backward(sizes, passes, weights),
        header(name, ("x", *weights), "", len(results)),
        wrapped(f"x (B, {n}, {d}) -> x @ (x^T @ rank) {gives}{handed}.", 4, first=3),
        body(function, ["x", *weights, "dispatch.output_dtype(x)"]),
    )


def _mix_backward(sizes: FmSizes, passes: bool, weights: Sequence[str]) -> tuple[str, ...]:
    backward = FmBackward(sizes, passes)
    known = {"x": "samples", **{weight: f"{weight}.to(samples.dtype)" for weight in weights}}
    sums = [f"d{weight}_sums" for weight in weights]
    dtypes = [item for weight, total in zip(weights, sums, strict=True) for item in (total, f"{weight}.dtype")]
    dx = "dx" if passes else "dx.to(ctx.x_dtype)"
    gradients = [dx, *(f"d{weight}.view({weight}.shape)" for weight in weights), "None"]
    given = [f"{name}: Tensor" for name in backward.parameters if name not in known]
    return (
        *backward_header(given),
        f"{M}samples, {', '.join(weights)} = ctx.saved_tensors",
        *called(("dx", *sums), backward.function, [known.get(name, name) for name in backward.parameters]),
        *called([f"d{weight}" for weight in weights], f"reduce_{len(weights)}", dtypes),
        *returned(gradients),
    )


def concat_norm_view(spec: ConcatNormForward, name: str, function: str) -> FunctionView:
    """A join."""
    tensors, width = spec.parameters, spec.width
    joined = f"{spec.parts} parts one after another" if spec.parts > 1 else "a tensor"
    plus = " plus the residual" if spec.residual else ""
    shown = ", ".join(f"{part} (B, n_{index}, {width})" for index, part in enumerate(part_names(spec.parts)))
    whole = f"residual and result (B, n, {width})" if spec.residual else f"result (B, n, {width})"
    added = [*part_names(spec.parts), *(["residual"] if spec.residual else [])]
    return FunctionView(
        function,
        wrapped(f"The {spec.norm} of {joined}{plus}.", INDENT // 2, first=3),
        header("forward", tensors, "dtype: torch.dtype", 1, method=True),
        (
            *called(spec.results, spec.function, [*tensors, "dtype"]),
            *_lines("", call("ctx.save_for_backward", map(Code, [*tensors, *spec.results[1:]]))),
            f"{M}return out",
        ),
        _join_backward(spec, added),
        header(name, tensors, "", 1),
        wrapped(f"{shown}; {whole}, n the sum of all rows.", 4, first=3),
        body(function, [*tensors, f"dispatch.joined_dtype({', '.join(added)})"]),
    )


def _join_backward(spec: ConcatNormForward, added: Sequence[str]) -> tuple[str, ...]:
    backward, tensors = backward_of(spec), [*spec.parameters, *spec.results[1:]]
    vectors = [name for name in ("weight", "bias") if name in spec.parameters]
    sums = [f"d{name}_sums" for name in vectors]
    dtypes = [item for name, total in zip(vectors, sums, strict=True) for item in (total, f"{name}.dtype")]
    parts = part_names(spec.parts)
    gradients = [f"d{part}.to({part}.dtype)" for part in parts] if spec.parts > 1 else ["dx.to(part_0.dtype)"]
    gradients += ["dx.to(residual.dtype)"] if spec.residual else []
    rows = ", ".join(f"{part}.shape[1]" for part in parts)
    return (
        *backward_header(["grad: Tensor"]),
        *unpacked(tensors, "ctx.saved_tensors", INDENT),
        *called(("dx", *sums), backward.function, backward.parameters),
        *(called([f"d{name}" for name in vectors], f"reduce_{len(vectors)}", dtypes) if vectors else []),
        *(unpacked([f"d{part}" for part in parts], f"dx.split(({rows}), 1)", INDENT) if spec.parts > 1 else []),
        *returned([*gradients, *(f"d{name}" for name in vectors), "None"]),
    )


def header(function: str, tensors: Sequence[str], last: str, results: int, method: bool = False) -> str:
    """A function of tensors that returns so many; as an autograd function's `method` it takes `ctx` first."""
    typed = [*(["ctx: Any"] if method else []), *(f"{name}: Tensor" for name in tensors), *([last] if last else [])]
    gives = "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"
    return lay_out("def ", call(function, map(Code, typed)), f" -> {gives}:", INDENT // 2 if method else 0)


def backward_header(gradients: Sequence[str]) -> list[str]:
    """The header of an autograd function's backward, given the gradients of its results."""
    shown = call("backward", map(Code, ["ctx: Any", *gradients]))
    return lay_out("def ", shown, " -> tuple[Tensor | None, ...]:", INDENT // 2).split("\n")


def called(targets: Sequence[str], kernel: str, arguments: Sequence[str]) -> list[str]:
    """`targets = fused.kernel(arguments)`."""
    return assigned(targets, call(f"fused.{kernel}", map(Code, arguments)), INDENT)


def _lines(before: str, code: Code) -> list[str]:
    return lay_out(before, code, "", INDENT).split("\n")


def returned(values: Sequence[str]) -> list[str]:
    """`return values`."""
    line = f"{M}return {', '.join(values)}"
    return [line] if len(line) <= WIDTH else [f"{M}return (", *(f"{M}    {value}," for value in values), f"{M})"]


def body(function: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A wrapper's body: the autograd function is applied."""
    applied = lay_out("y: Any = ", call(f"{function}.apply", map(Code, arguments)), "", 4)
    return (*applied.split("\n"), "    return y")


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
