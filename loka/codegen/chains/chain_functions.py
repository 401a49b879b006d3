"""The chains of a package: an autograd function for each shape, its wrapper, and a function for frozen weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loka.codegen.chains.chain_backward import ChainBackward, argument_width
from loka.codegen.chains.chain_forward import ChainForward, sums_dtype, torch_steps
from loka.codegen.chains.chain_names import ChainNames
from loka.codegen.chains.chain_shapes import ChainShape
from loka.codegen.chains.chain_views import ChainView, FrozenChainView, has_operands, kernels_of, scalings_of
from loka.codegen.modules.linear_recipes import recipe_label
from loka.codegen.names import Layers, Names, class_of, listed
from loka.kernels.fused.rendering import AnySpec


class Chains:
    """The chains of one package and the kernels they call, each once, in order of first use."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._function_names: dict[ChainShape, str] = {}
        self._layers: dict[ChainShape, dict[str, None]] = {}
        self._trained: dict[ChainShape, str] = {}  # shape -> name of the class
        self._frozen: dict[ChainShape, None] = {}

    def function(self, shape: ChainShape, layers: Layers, frozen: bool) -> str:
        """Register a call; returns the wrapper's name in kernels.py, after the first layers with this shape."""
        if shape not in self._function_names:
            self._function_names[shape] = self._names.first_free((layers.name, layers.longer), ("_frozen",))
        name = self._function_names[shape]
        self._layers.setdefault(shape, {}).update(dict.fromkeys(layers.paths))
        if frozen:
            self._frozen.setdefault(shape)
            return f"{name}_frozen"
        if shape not in self._trained:
            self._trained[shape] = self._names.unique(class_of(name))
        return name

    def views(self) -> tuple[ChainView, ...]:
        """Views of all registered chains for training."""
        return tuple(self._view(shape, function) for shape, function in self._trained.items())

    def frozen_views(self) -> tuple[FrozenChainView, ...]:
        """Views of all registered chains for frozen weights."""
        return tuple(self._frozen_view(shape) for shape in self._frozen)

    @property
    def known(self) -> bool:
        """True if any chain has static scales."""
        return any(shape.known for shape in (*self._trained, *self._frozen))

    @property
    def scalings(self) -> list[str]:
        """The scalings that GEMMs of chains read as constants of the module."""
        return sorted(set().union(*map(scalings_of, (*self.views(), *self.frozen_views()))))

    @property
    def operands(self) -> bool:
        """True if any chain has operands in `Quantized`."""
        return any(map(has_operands, self.views()))

    def specs(self) -> tuple[AnySpec, ...]:
        """Specs of the kernels that the chains call."""
        views = (*self.views(), *self.frozen_views())
        return tuple(dict.fromkeys(spec for view in views for spec in kernels_of(view)))

    def _view(self, shape: ChainShape, function: str) -> ChainView:
        names = ChainNames(shape)
        backward = ChainBackward(shape, names)
        backward_stages, norm = backward.stages(), backward.norm()
        tensors = names.tensors()
        return ChainView(
            **self._common(shape, names, frozen=False),
            parameters=_typed(tensors, names),
            function=function,
            recipe="; ".join(dict.fromkeys(recipe_label(stage.recipe.items()) for stage in shape.stages)),
            forward_parameters=_typed(tensors, names, {"dtype": "torch.dtype"}),
            applied=_applied(names),
            saved=names.saved_groups(),
            saves_operands=names.saves_operands(),
            copied_weights=names.copied_weights(),
            dtypes=names.dtypes(),
            overflow_stats=tuple(names.overflow_stats()),
            optional=backward.optional(),
            backward=backward_stages,
            norm=norm,
            reduce=backward.reduce(norm),
            dx=backward.x(),
            other_gradients=backward.others(),
            gradients=backward.gradients(),
            torch_steps=torch_steps(shape, names),
        )

    def _frozen_view(self, shape: ChainShape) -> FrozenChainView:
        names = ChainNames(shape)
        parameters = _typed(names.frozen_tensors(), names)
        return FrozenChainView(**self._common(shape, names, frozen=True), parameters=parameters)

    def _common(self, shape: ChainShape, names: ChainNames, frozen: bool) -> dict[str, Any]:
        """The fields of both views: the function's name and sizes, and its forward."""
        x = "rows" if frozen else "x"
        stages = ChainForward(shape, names, frozen, x)
        forward = stages.stages()
        return {
            "name": self._function_names[shape] + ("_frozen" if frozen else ""),
            "layers": listed(list(self._layers[shape])),
            "steps": shape.ops,
            "sizes": _sizes(shape, names),
            "k": _input_width(shape),
            "width": shape.stages[-1].n,
            "counter_ids": tuple(names.counter_ids()),
            "others": {other: argument_width(shape, other) for other in shape.others},
            "x": x,
            "input": stages.input(),
            "sums_dtype": sums_dtype(forward, names),
            "cast_weights": stages.cast_weights(),
            "forward": forward,
            "result": names.result,
        }


def _applied(names: ChainNames) -> tuple[tuple[str, ...], ...]:
    """The wrapper's arguments for forward: those of the whole chain, of each stage, and the others."""
    (_, *first), *stages = names.tensor_groups()
    groups = [["rows", *first], *stages, ["dtype"], names.counter_ids()]
    return tuple(tuple(group) for group in groups if group)


def _typed(tensors: Sequence[str], names: ChainNames, between: Mapping[str, str] | None = None) -> dict[str, str]:
    """A function's parameters and their types."""
    counter_ids = dict.fromkeys(names.counter_ids(), "int")
    return {**dict.fromkeys(tensors, "Tensor"), **(between or {}), **counter_ids}


def _input_width(shape: ChainShape) -> int:
    return shape.stages[0].given or shape.stages[0].k


def _sizes(shape: ChainShape, names: ChainNames) -> str:
    """The matrix arguments with their sizes: "x (..., 512), weight (2048, 512)"."""
    others = [f"{other} (..., {argument_width(shape, other)})" for other in shape.others]
    weights = [
        f"weight{names.suffix(index)} ({stage.n}, {stage.given or stage.k})" for index, stage in enumerate(shape.stages)
    ]
    return ", ".join([f"x (..., {_input_width(shape)})", *others, *weights])
