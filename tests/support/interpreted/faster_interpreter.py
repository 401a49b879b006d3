"""Triton's interpreter made faster: what it computes anew at every operation, to the same effect, is computed once.

Nearly all of its time goes into types, none into numbers: at every operation it builds the types of both operands with
their shapes, checks that these are powers of two, and makes a table of dtypes; at every call of one function by another
it exchanges the functions of triton.language again, after listing all of them; and it computes whether integers
overflow without looking at the answer, which its `debug` is for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from loka.kernels.fused import operators
from tests.support.kernels.poison import poisoned

PROGRAMS = 3


def as_on_a_gpu() -> None:
    """For this process: kernels are interpreted, as if on a GPU of three multiprocessors.

    What a kernel leaves unwritten is NaN.
    """
    make_faster()
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS
    operators.programs_for = lambda m, device, rows, per_multiprocessor: PROGRAMS
    Tensor.new_empty = poisoned(Tensor.new_empty)  # type: ignore[method-assign]


class PatchOnce:
    """`_patch_lang`, which does nothing for modules that were patched since the launch under way began."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch, self._launch = patch, interpreter._LangPatchScope()
        self._patched: set[frozenset[str]] = set()
        self._seen: dict[Any, frozenset[str]] = {}

    def __call__(self, function: Any) -> Any:
        modules = self._seen.get(function)
        if modules is None:
            modules = self._seen[function] = frozenset(
                value.__name__ for value in function.__globals__.values() if value is tl or value is core
            )  # a kernel sees the one, the functions of Triton's own library the other
        starts = not self._launch._changes  # a launch restores what it changed when it ends
        if starts:
            self._patched.clear()
        elif modules in self._patched:
            return interpreter._LangPatchScope()
        self._patched.add(modules)
        scope = self._patch(function)
        if starts:
            self._launch = scope
        return scope


class Builtins:
    """`_patch_builtin`, which lists what to exchange in a module or class once."""

    def __init__(self) -> None:
        self._found: dict[Any, list[tuple[str, Any]]] = {}

    def __call__(self, package: Any, builder: Any, scope: Any) -> None:
        if package not in self._found:
            self._found[package] = [item for item in inspect.getmembers(package) if core.is_builtin(item[1])]
        for name, member in self._found[package]:
            interpreter._patch_attr(package, name, member, builder, scope)


def _place(rewriter: Any) -> tuple[str, int]:
    """`_get_jit_fn_file_line`, which asks for a whole compiled function to know where it stands."""
    code = rewriter.fn.__code__
    return code.co_filename, code.co_firstlineno


class Shapes:
    """The shapes of block types by their sizes, each checked once and then shared."""

    def __init__(self) -> None:
        self._check = core.block_type.__init__
        self._known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def make_type(self, made: Any, element: Any, shape: Any) -> None:
        """`block_type.__init__`."""
        values = shape.values if isinstance(shape, core.tuple) else shape
        sizes = tuple([value.value if isinstance(value, core.constexpr) else value for value in values])
        if sizes not in self._known:
            self._check(made, element, shape)
            self._known[sizes] = (made.shape, made.numel, str(made.shape))
        made.element_ty = element
        made.shape, made.numel, text = self._known[sizes]
        made.name = f"<{text}, {element}>"


_SCALAR = core.tuple([]), core.constexpr(1)


def _make_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`: the shape of constants is kept beside the type's shape of numbers."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    if not type.is_block():
        tensor.shape, tensor.numel = _SCALAR
        return
    kept = vars(type.shape)
    if "constants" not in kept:
        kept["constants"] = core.tuple([core.constexpr(size) for size in type.shape]), core.constexpr(type.numel)
    tensor.shape, tensor.numel = kept["constants"]


class Dtypes:
    """`_get_np_dtype` by the name of a type."""

    def __init__(self) -> None:
        self._find = interpreter._get_np_dtype
        self._known: dict[str, np.dtype[Any]] = {}

    def __call__(self, type: Any) -> np.dtype[Any]:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if isinstance(element, core.pointer_type):
            return np.dtype(np.uint64)
        if element.name not in self._known:
            self._known[element.name] = self._find(element)
        return self._known[element.name]


class Broadcast:
    """`broadcast_impl_value`, which leaves operands of one shape alone."""

    def __init__(self) -> None:
        self._broadcast = TritonSemantic.broadcast_impl_value

    def __call__(self, semantic: Any, left: Any, right: Any) -> tuple[Any, Any]:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (False, False) or (all(blocks) and left.type.shape is right.type.shape):
            return left, right
        broadcast: tuple[Any, Any] = self._broadcast(semantic, left, right)
        return broadcast


def make_faster() -> None:
    """For this process; a Triton whose interpreter keeps no list of its changes is left as it is."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    shapes, broadcast = Shapes(), Broadcast()
    interpreter._patch_lang = PatchOnce(interpreter._patch_lang)
    interpreter._patch_builtin = Builtins()
    interpreter.FunctionRewriter._get_jit_fn_file_line = _place
    interpreter._get_np_dtype = Dtypes()
    core.block_type.__init__ = lambda made, element, shape: shapes.make_type(made, element, shape)
    core.tensor.__init__ = _make_tensor
    TritonSemantic.broadcast_impl_value = lambda semantic, left, right: broadcast(semantic, left, right)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
