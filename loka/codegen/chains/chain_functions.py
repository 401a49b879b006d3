"""The chains of a package: the values that stand for each, and the functions that run them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass

from loka.codegen.chains.chain_shapes import ChainShape
from loka.codegen.chains.chain_stages import ChainStages, argument_width
from loka.codegen.layout import literal, tuple_of
from loka.codegen.names import Layers, Names, listed
from loka.kernels.chain_values import Chain, Stage, StageGemms
from loka.kernels.fused.rendering import AnySpec


@dataclass(frozen=True, slots=True)
class ChainFunctionView:
    """View of a function that runs a chain, for templates/chain.py.j2."""

    name: str
    constant: str  # the chain
    layers: str  # the model's layers that call it
    steps: tuple[str, ...]  # layer_norm, linear, silu
    sizes: str  # "x (..., 512), weight (2048, 512)"
    width: int  # of the result
    parameters: dict[str, str]  # name -> type
    matrices: tuple[str, ...]  # x and the arguments that stages multiply by or add
    norm: str  # parameters of the norm before the first linear
    linears: tuple[str, ...]
    fp8: bool  # GEMMs count


@dataclass(frozen=True, slots=True)
class ChainsView:
    """View of all chains: constants by name, as Python, and functions."""

    constants: dict[str, str]
    chains: dict[str, str]
    functions: tuple[ChainFunctionView, ...]
    classes: tuple[str, ...]  # that the constants call
    fp8: bool  # any GEMMs count

    def __bool__(self) -> bool:
        return bool(self.chains)


class Chains:
    """The chains of one package and the kernels they call, each once, in order of first use."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._function_names: dict[ChainShape, str] = {}
        self._layers: dict[ChainShape, dict[str, None]] = {}

    def function(self, shape: ChainShape, layers: Layers) -> str:
        """Register a call; returns the function's name in kernels.py, after the first layers with this shape."""
        if shape not in self._function_names:
            self._function_names[shape] = self._names.first_free((layers.name, layers.longer))
        self._layers.setdefault(shape, {}).update(dict.fromkeys(layers.paths))
        return self._function_names[shape]

    @property
    def known(self) -> bool:
        """True if any chain has static scales."""
        return any(shape.known for shape in self._function_names)

    def specs(self) -> tuple[AnySpec, ...]:
        """Specs of the kernels that the chains call."""
        made = [ChainStages(shape) for shape in self._function_names]
        for each in made:
            each.chain()
        return tuple(dict.fromkeys(spec for each in made for spec in each.specs))

    def view(self) -> ChainsView:
        """View of all chains."""
        constants = _Constants()
        names = {shape: constants.reserve(name) for shape, name in self._function_names.items()}
        chains = {name: constants.chain(name, ChainStages(shape).chain(), shape) for shape, name in names.items()}
        texts = " ".join([*constants.texts.values(), *chains.values()])
        return ChainsView(
            constants.texts,
            chains,
            tuple(self._function(shape, name) for shape, name in names.items()),
            tuple(sorted(set(re.findall(r"\b([A-Z]\w*[a-z])\(", texts)))),
            any(shape.fp8 for shape in names),
        )

    def _function(self, shape: ChainShape, constant: str) -> ChainFunctionView:
        matrices = ("x", *shape.others)
        before = shape.stages[0].before
        norm = ("norm",) if before is not None and (before.weight or before.bias) else ()
        linears = tuple(f"linear{_suffix(shape, index)}" for index in range(len(shape.stages)))
        return ChainFunctionView(
            name=self._function_names[shape],
            constant=constant,
            layers=listed(list(self._layers[shape])),
            steps=shape.ops,
            sizes=_sizes(shape),
            width=shape.stages[-1].n,
            parameters=dict.fromkeys(matrices, "Tensor") | dict.fromkeys((*norm, *linears), "Tensors"),
            matrices=matrices,
            norm="norm" if norm else "()",
            linears=linears,
            fp8=shape.fp8,
        )


class _Constants:
    """Values of chains as Python; those that chains share, stages and their GEMMs, are constants with names."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._names = Names(("stamp",))
        self._found: dict[Stage | StageGemms, str] = {}

    def reserve(self, wanted: str) -> str:
        """A name of its own for a constant."""
        return self._names.unique(wanted.lower()).upper()

    def chain(self, name: str, chain: Chain, shape: ChainShape) -> str:
        """A chain whose stages are constants: called as what they hold, or else by their chain and place in it."""
        for number, stage in enumerate(chain.stages):
            own = f"{name}_{number}"
            if stage.gemms != StageGemms():
                kind = ["static"] * stage.gemms.static + ["native_wgrad"] * stage.gemms.keeps_wgrad
                self._name(["_".join(["fp8_gemms", *kind]), f"{own}_gemms"], stage.gemms)
            runs = "fp8" if shape.fp8 else "native"
            makes = [] if stage is chain.stages[-1] else ["to", runs]
            self._name(["_".join([runs, *shape.stages[number].ops, *makes]), own], stage)
        return self._text(chain)

    def _name(self, wanted: Sequence[str], value: Stage | StageGemms) -> None:
        if value not in self._found:
            text = self._text(value)
            self._found[value] = self._names.first_free([name.lower() for name in wanted]).upper()
            self.texts[self._found[value]] = text

    def _text(self, value: object) -> str:
        """A value as Python, without fields that are as they are by default."""
        if isinstance(value, Stage | StageGemms) and value in self._found:
            return self._found[value]
        if isinstance(value, tuple):
            return tuple_of([self._text(item) for item in value])
        if not is_dataclass(value):
            return literal(value)
        arguments = []
        for each in fields(value):
            given = getattr(value, each.name)
            if each.init and given != each.default:
                name = f"{each.name}=" if each.kw_only or each.default is not MISSING else ""
                arguments.append(name + self._text(given))
        return f"{type(value).__name__}({', '.join(arguments)})"


def _suffix(shape: ChainShape, index: int) -> str:
    return f"_{index}" if len(shape.stages) > 1 else ""


def _sizes(shape: ChainShape) -> str:
    """The matrix arguments with their sizes: "x (..., 512), weight (2048, 512)"."""
    others = [f"{other} (..., {argument_width(shape, other)})" for other in shape.others]
    weights = [
        f"weight{_suffix(shape, index)} ({stage.n}, {stage.given or stage.k})"
        for index, stage in enumerate(shape.stages)
    ]
    return ", ".join([f"x (..., {shape.stages[0].given or shape.stages[0].k})", *others, *weights])
