"""What the code of a module's forward looks like: the functions it may call, and the names in them.

Imports only torch and the standard library.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import torch
from torch import nn

_MEANS = frozenset({"mean", "var", "var_mean", "std", "layer_norm", "rms_norm"})
_PARTS = _MEANS | {
    "relu", "silu", "gelu", "sigmoid", "tanh", "hardswish", "threshold", "exp", "erf", "softplus", "leaky_relu",
    "where", "maximum", "max", "clamp", "clamp_min", "clip",
}  # fmt: skip
_LAMBDA = "<lambda>"
_ARITHMETIC = frozenset(
    {"add", "mul", "multiply", "sum", "addcmul", "einsum", "cat", "concat", "concatenate", "hstack"}
)
_SIMPLE = (int, str, bool, float, complex, type(None), torch.dtype, torch.device)


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module runs hooks besides its forward."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def functions_of(module: nn.Module) -> tuple[FunctionType, ...]:
    """The functions outside torch and the standard library that the module's forward may call, forward first.

    Calls are followed by name: methods and properties of the class (and of its bases where `super` is used), functions
    of the same file, of imported modules, and functions kept as attributes. The result may contain too many.
    """
    found: dict[FunctionType, None] = {}
    for forward in _named(module, "forward", everywhere=False):
        _follow(forward, module, found)
    return tuple(found)


def names_in(function: FunctionType) -> frozenset[str]:
    """All global and attribute names in a function's code, including inner functions."""
    return frozenset(_code_names(function.__code__))


def is_own_function(module: nn.Module) -> bool:
    """True if a module looks like a hand-written norm or activation.

    It has neither children nor buffers, at most two Parameters, all (n,), and a forward that names one of torch's
    functions that these are made of. Tracing shows what it does with them.
    """
    return _has_vectors(module) and any(_PARTS & names_in(function) for function in functions_of(module))


def _has_vectors(module: nn.Module) -> bool:
    """True for a module without children and buffers, and with at most two Parameters, all (n,)."""
    sizes = {tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None}
    plain = not module._modules and not module._buffers and len(module._parameters) <= 2
    return plain and (not sizes or (len(sizes) == 1 and len(next(iter(sizes))) == 1))


def is_own_arithmetic(module: nn.Module) -> bool:
    """True if a module looks like sums, products or concatenations of its arguments, such as `x * y`.

    It has neither children nor Parameters nor buffers. Tracing shows what it computes.
    """
    if module._modules or module._parameters or module._buffers:
        return False
    return has_operators(module) or any(_ARITHMETIC & names_in(function) for function in functions_of(module))


def has_operators(module: nn.Module) -> bool:
    """True if a hand-written forward uses an infix operator."""
    instructions = (step for function in functions_of(module) for step in dis.get_instructions(function))
    return any(step.opname == "BINARY_OP" for step in instructions)


def is_block_norm(module: nn.Module) -> bool:
    """True if a module looks like a hand-written RMSNorm over blocks.

    It has no Parameters or buffers, and its forward calls `rms_norm`, or its only child is an nn.RMSNorm. As in torch's
    own norms, its `eps` is built into the traced text.
    """
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return False
    children = list(module.children())
    if children:
        return len(children) == 1 and type(children[0]) is nn.RMSNorm and bool(functions_of(module))
    return any("rms_norm" in names_in(function) for function in functions_of(module))


def is_swish_norm(module: nn.Module) -> bool:
    """True if a module looks like a SwishNorm: a hand-written forward over one sigmoid and a norm.

    Its children are an nn.Sigmoid or nn.Hardsigmoid and one nn.LayerNorm, nn.RMSNorm or block norm, possibly inside
    nn.Sequentials; it has no Parameters or buffers of its own. Tracing shows what its forward does with them.
    """
    if module._parameters or module._buffers or not functions_of(module):
        return False
    parts = list(_leaves(module))
    gates = [part for part in parts if type(part) in (nn.Sigmoid, nn.Hardsigmoid)]
    norms = [part for part in parts if type(part) in (nn.LayerNorm, nn.RMSNorm) or is_block_norm(part)]
    return len(gates) == len(norms) == 1 and len(parts) == 2


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module, with nn.Sequentials replaced by their content."""
    for child in module.children():
        if type(child) is nn.Sequential:
            yield from _leaves(child)
        else:
            yield child


def same_type(cls: type, planned: str) -> bool:
    """True if a class is the one of a plan's qualified name, which knows a class of `__main__` by its file's name."""
    return qualified(cls) == planned or (in_script(cls.__module__) and qualified(cls, script_in((planned,))) == planned)


def is_simple(value: object) -> bool:
    """True for plain data, or a tuple of plain data: equal values have equal reprs."""
    if isinstance(value, tuple):
        return all(is_simple(item) for item in value)
    return isinstance(value, _SIMPLE)


def qualified(thing: object, script: str = "") -> str:
    """`package.module.Name` of a class or function; `script.Name` if the script that runs defines it."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    return f"{module_name(getattr(thing, '__module__', None), script)}.{name}"


def module_name(name: str | None, script: str) -> str | None:
    """A module's name; `script`, unless it is "", for the script that runs."""
    return script if script and in_script(name) else name


def _follow(function: FunctionType, module: nn.Module, found: dict[FunctionType, None]) -> None:
    if function in found or is_foreign(function.__module__):
        return
    found[function] = None
    names = sorted(names_in(function))
    for name in names:
        for called in _named(module, name, everywhere="super" in names):
            _follow(called, module, found)
        for called in _plain_functions(_in_scope(function, name, names)):
            _follow(called, module, found)


def _named(module: nn.Module, name: str, everywhere: bool) -> Iterator[FunctionType]:
    """Functions that `self.name` may refer to; `everywhere`: in every base class, not just the first that has it."""
    if name in vars(module):
        yield from _plain_functions([vars(module)[name]])
    for base in type(module).__mro__:
        if name in vars(base):
            yield from _plain_functions([vars(base)[name]])
            if not everywhere:
                return


def _in_scope(function: FunctionType, name: str, names: list[str]) -> Iterator[object]:
    value = function.__globals__.get(name)
    yield value
    if isinstance(value, ModuleType) and not is_foreign(value.__name__):
        for attribute in names:
            yield vars(value).get(attribute)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            continue


def _plain_functions(values: Iterable[object]) -> Iterator[FunctionType]:
    for value in values:
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        value = inspect.unwrap(value) if callable(value) and not isinstance(value, type | nn.Module) else value
        if isinstance(value, FunctionType):
            yield value


def is_foreign(module: str | None) -> bool:
    root = _root(module or "")
    return root == "torch" or root in sys.stdlib_module_names - {"__main__"}


def _root(module: str) -> str:
    return module.partition(".")[0]


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


_MAIN = "__main__"
_NAMES = frozenset({_MAIN, "__mp_main__"})  # the second in processes that multiprocessing has spawned


def in_script(module: str | None) -> bool:
    """True if a module of this name is the script that runs."""
    return module in _NAMES


def script_file() -> Path | None:
    """The absolute path of the script that runs; None in an interactive session or a notebook."""
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    return Path(os.path.abspath(file)) if file else None


def script_in(planned: Iterable[str]) -> str:
    """The module name under which a plan knows the script that runs: "train", or "package.train".

    Args:
        planned: Qualified names in the plan, such as "package.train.Ranker".

    Returns:
        The first module among them whose name is the end of the script's path; without one, the name of the script's
        file. "" if there is no such file.
    """
    file = script_file()
    if file is None:
        return ""
    path = file.with_suffix("").parts
    for name in planned:
        parts = tuple(name.split("."))
        for end in range(len(parts) - 1, 0, -1):
            if parts[:end] == path[-end:]:
                return ".".join(parts[:end])
    return file.stem
