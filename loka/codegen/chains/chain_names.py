"""Names in a chain's code: arguments, intermediate results, and tensors saved for backward."""

from __future__ import annotations

from loka.codegen.chains import chain_shapes as shapes
from loka.codegen.chains.chain_shapes import ChainShape
from loka.codegen.chains.chain_views import OPERAND
from loka.codegen.chains.static_operands import input_kernel

# Results of `CastTranspose`, and their names here.
_COPIES = (("values", "fp8"), ("transposed", "fp8_t"), ("scale", "scale"))


class ChainNames:
    """Names of arguments and intermediate results in a chain's function; stages differ by a numeric suffix."""

    def __init__(self, shape: ChainShape) -> None:
        self._shape = shape

    @property
    def result(self) -> str:
        """The result of forward."""
        stage = self._shape.stages[-1]
        return "out" if stage.followed else f"y{self.suffix(len(self._shape.stages) - 1)}"

    def suffix(self, index: int) -> str:
        """Suffix of a stage's names: "_1" for the second; "" if there is only one stage."""
        return f"_{index}" if len(self._shape.stages) > 1 else ""

    def hidden(self, index: int) -> str:
        """The input of a native linear: the result of the kernel before it, or a plain product."""
        if index and not self._shape.stages[index - 1].followed:
            return f"y{self.suffix(index - 1)}"
        return f"h{self.suffix(index)}"

    def quantized(self, operand: str, index: int, frozen: bool = False) -> dict[str, str]:
        """The results of a quantizing kernel: one `Quantized`, or without a transposed copy to make later two."""
        if self._has_copy(operand, index, frozen):
            return {OPERAND: f"{operand}_fp8{self.suffix(index)}"}
        values, scale = self.operand(operand, index, frozen)
        return {"values": values, "scale": scale, "scale_max": "_"}

    def operand(self, operand: str, index: int, frozen: bool = False) -> tuple[str, str]:
        """An FP8 operand of a GEMM, and its scales."""
        s = self.suffix(index)
        if self._has_copy(operand, index, frozen):
            return f"{operand}_fp8{s}.data", f"{operand}_fp8{s}.scale"
        return f"{operand}_fp8{s}", f"{operand}_scale{s}"

    def _has_copy(self, operand: str, index: int, frozen: bool) -> bool:
        """True for a rowwise operand that backward transposes."""
        kept = operand != "weight" and self._shape.stages[index].keeps_wgrad
        return not (frozen or self._shape.known or kept)

    def static_scale(self, operand: str, index: int) -> dict[str, str]:
        """The extra arguments of a kernel that quantizes an operand with a static scale."""
        s = self.suffix(index)
        return {"scale": f"{operand}_scale{s}", "overflow_stats": f"{operand}_overflow_stats{s}"}

    def both_copies(self, operand: str, index: int) -> dict[str, str]:
        """The results of a kernel that writes an operand and its transpose; for a weight also the scale."""
        s = self.suffix(index)
        return {name: f"{operand}_{kind}{s}" for name, kind in _COPIES}

    def plain_input(self, index: int) -> str:
        """A linear's input in the model's dtype, for a native wgrad."""
        if index == 0:
            return "x"
        return self.sum(index - 1) if self._shape.stages[index - 1].summed else f"y{self.suffix(index - 1)}"

    def after(self, index: int) -> dict[str, str]:
        """The parameters of the kernel after a linear."""
        s = self.suffix(index)
        return {"add": f"bias{s}", "weight": f"norm_weight{s}", "bias": f"norm_bias{s}"}

    def sum(self, index: int) -> str:
        """The sum of a stage's product and residual."""
        return f"sum{self.suffix(index)}"

    def dy(self, index: int) -> tuple[str, str]:
        """A stage's output gradient in FP8, and its scales."""
        if self._has_copy("dy", index, frozen=False):
            return "dy_fp8.data", "dy_fp8.scale"
        return "dy_fp8", f"dy_scale{self.suffix(index)}" if self._shape.known else "dy_scale"

    def source(self, name: str | int | None, x: str = "x") -> str:
        """The matrix a stage multiplies by or adds; `x`: name of the chain's input."""
        return self.sum(name) if isinstance(name, int) else x if name == "x" else str(name)

    @property
    def summed(self) -> tuple[str, ...]:
        """The arguments that stages multiply by or add."""
        used = dict.fromkeys(name for stage in self._shape.stages for name in (stage.times, stage.residual))
        return tuple(name for name in used if isinstance(name, str))

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
        """The tensor arguments of forward."""
        return [name for group in self.tensor_groups() for name in group]

    def tensor_groups(self) -> list[list[str]]:
        """The tensor arguments of forward: those of the whole chain, and of each stage."""
        stages = range(len(self._shape.stages))
        own = [[f"weight{self.suffix(index)}", *self.vectors(index), *self.static_scales(index)] for index in stages]
        return [["x", *self._shape.others, *self.pre_vectors()], *own]

    def static_scales(self, index: int) -> list[str]:
        """The static scales of a stage, each with its overflow statistics."""
        if not self._shape.known:
            return []
        return [name for operand in ("x", "dy") for name in self.static_scale(operand, index).values()]

    def overflow_stats(self) -> list[str]:
        """The overflow statistics that backward adds to."""
        stages = range(len(self._shape.stages)) if self._shape.known else ()
        return [self.static_scale("dy", index)["overflow_stats"] for index in stages]

    def frozen_tensors(self) -> list[str]:
        """The tensor arguments of the frozen function: each FP8 weight is followed by its scales."""
        found: list[str] = []
        stages = range(len(self._shape.stages))
        of_gradients = {name for index in stages for name in self.static_scale("dy", index).values()}
        for name in self.tensors():
            if name in of_gradients:
                continue
            is_weight = name.startswith("weight") and self._shape.fp8
            found += [name, name.replace("weight", "scale", 1)] if is_weight else [name]
        return found

    def counter_ids(self) -> list[str]:
        """The counter ids of FP8 GEMMs."""
        stages = range(len(self._shape.stages)) if self._shape.fp8 else ()
        return [f"counter_id{self.suffix(index)}" for index in stages]

    def saved(self) -> list[str]:
        """The tensors and operands that forward saves for backward."""
        return [name for group in self.saved_groups() for name in group]

    def saved_groups(self) -> tuple[tuple[str, ...], ...]:
        """Those of the norm before the first linear, if any, and of each stage; what two need is in the first."""
        every: set[str] = set()
        groups = []
        for names in (self._saved_before(), *(self._saved_of(index) for index in range(len(self._shape.stages)))):
            groups.append(tuple(name for name in dict.fromkeys(names) if name not in every))
            every.update(names)
        return tuple(group for group in groups if group)

    def saves_operands(self) -> bool:
        """True if some of what is saved is `Quantized`."""
        stages = range(len(self._shape.stages)) if self._shape.fp8 else ()
        return any(self._has_copy("weight", index, frozen=False) for index in stages)

    def copied_weights(self) -> tuple[str, ...]:
        """The weights of which FP8 copies are saved in their place."""
        saved, suffixes = set(self.saved()), map(self.suffix, range(len(self._shape.stages)))
        return tuple(f"weight{s}" for s in suffixes if saved & {f"weight_fp8{s}", f"weight_fp8_t{s}"})

    def _saved_before(self) -> list[str]:
        """What backward needs for the norm before the first linear."""
        if self._shape.stages[0].before is None:
            return []
        spec = shapes.backward_before(self._shape.stages[0])
        statistics = [f"pre_{name}" for name in spec.parameters if name in ("mean", "rstd")]
        return ["x", *self.pre_vectors(), *statistics]

    def _saved_of(self, index: int) -> list[str]:
        """What backward needs for a stage."""
        stage, s = self._shape.stages[index], self.suffix(index)
        if self._shape.known:
            found = self._saved_static(index)
        elif self._shape.fp8:
            x = [self.plain_input(index)] if stage.keeps_wgrad else self.quantized("x", index).values()
            found = [*x, *self.quantized("weight", index).values()]
        else:
            found = [self.hidden(index), f"weight{s}"]
        found += [f"y{s}"] if stage.times is not None or (stage.bent and not stage.summed) else []
        found += [self.sum(index)] if stage.bent and stage.summed else []
        found += [stage.times] if stage.times is not None else []
        found += self.vectors(index)
        spec = shapes.backward_after(stage, self._shape.fp8)
        parameters = spec.parameters if spec is not None else ()
        return [*found, *(f"{name}{s}" for name in parameters if name in ("mean", "rstd"))]

    def _saved_static(self, index: int) -> list[str]:
        """The saved operands of a stage with static scales; of x only the transposed copy if there is one."""
        s, kept = self.suffix(index), self._shape.stages[index].keeps_wgrad
        x = "x_fp8_t" if "transposed" in input_kernel(self._shape, index).results else "x_fp8"
        operands = [self.plain_input(index)] if kept else [f"{x}{s}", f"x_scale{s}"]
        return [*operands, f"weight_fp8_t{s}", f"weight_scale{s}", f"dy_scale{s}"]

    def dtypes(self) -> dict[str, str]:
        """The dtypes that backward cannot take from saved tensors: name in backward -> expression in forward."""
        found = {}
        named = any("x" in (stage.times, stage.residual) for stage in self._shape.stages)
        if self._shape.fp8 and (len(self._shape.stages) > 1 or self._shape.stages[0].before is not None or named):
            found["dtype"] = "dtype"
        if self._shape.stages[0].before is None:
            found["x_dtype"] = "x.dtype"
        found |= {f"{other}_dtype": f"{other}.dtype" for other in self._shape.others}
        if self._shape.fp8:
            suffixes = [self.suffix(index) for index in range(len(self._shape.stages))]
            found |= {f"weight_dtype{s}": f"weight{s}.dtype" for s in suffixes}
        return found
