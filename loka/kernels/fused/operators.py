"""Runs generated kernels: directly in eager mode, as operators `loka_generated::NAME` where something else looks.

A plain eager call on a GPU allocates the results and launches the kernel in `triton_kernels`, which spares the host
the dispatcher. The operator is what torch.compile traces, what a TorchDispatchMode sees, and what runs the reference on
the CPU. On a GPU AOTAutograd traces into the allocations and the launch (`loka.kernels.decomposition`).

Imported by generated packages; needs only torch and the standard library.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from loka.kernels import decomposition
from loka.kernels.fused.launching import DirectCalls, Launch, flattened, launch, listed

NAMESPACE = "loka_generated"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
# Types of arguments of a direct call. A tensor that stands for others, such as a DTensor, has the address of none.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, type(None)})
_cuda: dict[str, Callable[..., Any]] = {}  # GPU implementation of each operator, by name
_operators: dict[str, KernelOperator] = {}  # by name, too


class KernelOperator(ABC):
    """The host's side of a kernel, of one family: what an operator takes, allocates, launches and computes on the CPU.

    Families derive from this, each with what is computed and the launch that was chosen.
    """

    kernel = ""  # the Triton kernel that it launches
    opaque = False  # whether the compiler must not look into the launch, as it calls torch in between
    flops = 0  # of its products, for each row of the first argument

    @property
    @abstractmethod
    def function(self) -> str:
        """Its name in a package."""

    @property
    @abstractmethod
    def schema(self) -> str:
        """Of the operator, as torch.library takes it: "(Tensor x) -> (Tensor, Tensor)"."""

    @abstractmethod
    def outputs(self, *arguments: Any) -> Any:
        """The results, allocated but not filled, after a check of the arguments: raises InputError.

        Also tells the compiler their shapes and dtypes, so that sizes may be symbolic. M is free in shapes, and P is
        the number of programs that a kernel is launched with.
        """

    @abstractmethod
    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        """Fill the results on a GPU, by the Triton kernels of a package's module `kernels`, each with `launch`.

        What is launched follows from the shapes, strides and dtypes of the arguments.
        """

    @abstractmethod
    def reference(self, *arguments: Any) -> Any:
        """The results in torch: what runs on the CPU, and what a kernel is compared with."""


class SpecOperator(KernelOperator):
    """An operator of a spec, which names it, its tensor parameters and its results."""

    spec: Any
    dtype = ""  # a parameter after the tensors, the dtype of a result: "ScalarType dtype"

    @property
    def function(self) -> str:
        name: str = self.spec.function
        return name

    @property
    def schema(self) -> str:
        kinds = {"overflow_stats": "Tensor(a!)", "mask": "Tensor?"}
        tensors = [f"{kinds.get(name, 'Tensor')} {name}" for name in self.spec.parameters]
        taken = ", ".join([*tensors, self.dtype] if self.dtype else tensors)
        results = ["Tensor"] * len(self.spec.results)
        return f"({taken}) -> {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}"


def of_package(package: str, digest: str) -> Callable[[KernelOperator], Callable[..., Any]]:
    """A function that makes operators of a generated package, FUNCTION_DIGEST, by `define`.

    `digest` is that of all kernels and operators of the package.
    """
    kernels = deferred(f"{package}.triton_kernels")

    def kernel(operator: KernelOperator) -> Callable[..., Any]:
        return define(f"{operator.function}_{digest}", operator, kernels)

    return kernel


def define(name: str, operator: KernelOperator, kernels: Callable[[], Any]) -> Callable[..., Any]:
    """A function that runs a kernel, with its operator `loka_generated::NAME` as `overload`, registered once.

    `kernels` gives the module of Triton kernels, on a GPU alone. No result is an argument. A name contains a digest of
    the kernels' text and launches, so that the same name in two packages means the same: the operator is kept, and the
    last `kernels` is used, as the package of an earlier one may be gone. The operator has no derivative: it is called
    inside a torch.autograd.Function. The function has `operator`, and its `reference`, as attributes.
    """

    def cuda(*arguments: Any) -> Any:
        results = operator.outputs(*arguments)
        operator.launch(kernels(), listed(results), arguments, launch)
        return results

    direct = DirectCalls(operator, kernels)
    _cuda[name], _operators[name] = cuda, operator
    packet = torch.ops.loka_generated
    if not hasattr(packet, name):
        _register(name, operator)
    overload: torch._ops.OpOverload = getattr(packet, name).default

    def run(*arguments: Any) -> Any:
        flat = flattened(arguments)
        if runs_directly() and _PLAIN.issuperset(map(type, flat)) and flat[0].is_cuda:
            return _on_its_device(direct, *arguments)
        return overload(*arguments)

    run.overload = overload  # type: ignore[attr-defined]
    run.operator = operator  # type: ignore[attr-defined]
    run.reference = operator.reference  # type: ignore[attr-defined]
    return run


def reference_of(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The reference of an operator from `define`."""
    return _operators[operator._schema.name.partition("::")[2]].reference


def flop_formulas() -> Iterator[tuple[torch._ops.OpOverloadPacket, Callable[..., int]]]:
    """The operators with products, each with its FLOPs by the shapes of its arguments."""
    for name, operator in _operators.items():
        if operator.flops:
            of_row = operator.flops
            yield getattr(torch.ops.loka_generated, name), lambda first, *_, of_row=of_row, **__: of_row * first[0]


def _register(name: str, operator: KernelOperator) -> None:
    """Define the operator `loka_generated::NAME` and its implementations."""

    def checked(*arguments: Any) -> Any:
        operator.outputs(*arguments)  # for its checks
        return operator.reference(*arguments)

    _library.define(name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, known_to_inductor(qualified, operator.outputs), lib=_library)
    _library.impl(name, checked, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, lambda *arguments: _on_its_device(_cuda[name], *arguments), "CUDA")  # type: ignore[no-untyped-call]
    if not operator.opaque:
        decomposition.register(qualified, lambda *arguments: _cuda[name](*arguments), _library)


def __getattr__(name: str) -> object:
    """Called for what this module does not have: raises AttributeError with what to do about an old package."""
    raise AttributeError(
        f"{__name__} has no {name!r}: the package that asks for it was generated by another version of LoKA; generate "
        "it again (loka generate POLICY)"
    )


def runs_directly() -> bool:
    """True in plain eager mode, where nothing but the GPU has to see a call: no compiler, no mode, as a Probe's is.

    The mode of a default device, which chooses where tensors are made, is none that has to.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    modes = torch._C._len_torch_function_stack()
    return modes == 0 or (modes == 1 and isinstance(torch._C._get_function_stack_at(0), DeviceContext))


def deferred(module: str) -> Callable[[], Any]:
    """A function that imports the module on its first call, with Triton.

    So a generated package can be imported, and its references run, without Triton.
    """

    found: Any = None

    def imported() -> Any:
        nonlocal found
        if found is None:
            found = importlib.import_module(module)
        return found

    return imported


def known_to_inductor(qualified: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` of the operator "NAMESPACE::NAME", which also registers the operator as a fallback with Inductor.

    Up to torch 2.12 Inductor registers an unknown operator itself, and formats the operator's arguments into a log
    message, even if it is not shown: each with everything that it was computed from. In the backward of a long chain
    that takes hours (vllm-project/vllm#43111 is the same problem).
    """
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        return fake
    namespace, _, name = qualified.partition("::")

    def shapes(*arguments: Any, **keywords: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        overload = getattr(getattr(torch.ops, namespace), name).default
        if lowering is not None and overload not in lowering.lowerings:
            tag = torch._library.utils.get_layout_constraint_tag(overload)
            lowering.make_fallback(overload, lowering.tag_to_layout_constraint(tag), warn=False)
        return fake(*arguments, **keywords)

    return shapes


def programs(x: Tensor, rows: int, per_multiprocessor: int) -> int:
    """Number of programs for the rows of x (M, ...): at least `rows` each, at most `per_multiprocessor` per SM.

    At least one, so that without rows a program still writes the (zero) sums; one on the CPU, where the reference runs.
    M may be symbolic.
    """
    return programs_for(x.shape[0], x.device, rows, per_multiprocessor)


def programs_for(m: int, device: torch.device, rows: int, per_multiprocessor: int) -> int:
    """Number of programs for m rows, as in `programs`."""
    if device.type != "cuda":
        return 1
    steps = (m + rows - 1) // rows
    return _at_least(_at_most(steps, per_multiprocessor * multiprocessors(device.index)), 1)


def row_parts(x: Tensor, rows: int, across: int, per_multiprocessor: int) -> int:
    """Number of parts of the rows of x (M, ...), where `across` programs share each row.

    Each part has at least `rows`; all programs together are at most about `per_multiprocessor` per SM. At least one
    part, so that without rows programs still write the (zero) sums; one on the CPU.
    """
    if x.device.type != "cuda":
        return 1
    steps = (x.shape[0] + rows - 1) // rows
    places = max(1, per_multiprocessor * multiprocessors(x.device.index) // across)
    return _at_least(_at_most(steps, places), 1)


def tiles(x: Tensor, side: int) -> int:
    """Number of `side` x `side` tiles that cover x (M, N), at least one; one on the CPU, where the reference runs."""
    if x.device.type != "cuda":
        return 1
    down, across = ((size + side - 1) // side for size in x.shape)
    return _at_least(down, 1) * _at_least(across, 1)


@cache
def multiprocessors(device: int | None) -> int:
    """Number of multiprocessors of a CUDA device, cached."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _on_its_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` with the first argument's device as the current one, where Triton launches."""
    device = flattened(arguments)[0].get_device()
    if device == torch._C._cuda_getDevice():
        return function(*arguments)
    with torch.cuda.device(device):
        return function(*arguments)


def _at_most(size: int, limit: int) -> int:
    """min(size, limit), where a symbolic size must not become a guard."""
    if type(size) is int:
        return min(size, limit)
    least: int = torch.sym_min(size, limit)  # type: ignore[no-untyped-call]
    return least


def _at_least(size: int, limit: int) -> int:
    """max(size, limit), where a symbolic size must not become a guard."""
    if type(size) is int:
        return max(size, limit)
    most: int = torch.sym_max(size, limit)  # type: ignore[no-untyped-call]
    return most
