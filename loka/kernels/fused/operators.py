"""Runs generated kernels: directly in eager mode, as operators `loka_generated::NAME` where something else looks.

A plain eager call on a GPU allocates the results and launches the kernel in `triton_kernels`, which spares the host
the dispatcher. The operator is what torch.compile traces, what a TorchDispatchMode sees, and what runs the reference on
the CPU. On a GPU AOTAutograd traces into the allocations and the launch (`loka.kernels.decomposition`).

Imported by generated packages; needs only torch and the standard library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels import decomposition

NAMESPACE = "loka_generated"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
# Types of arguments of a direct call. A tensor that stands for others, such as a DTensor, has the address of none.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, type(None)})
_cuda: dict[str, Callable[..., Any]] = {}  # GPU implementation of each operator, by name
_operators: dict[str, KernelOperator] = {}  # by name, too


Launch = Callable[..., Any]  # `launch`, or what records its calls


class KernelOperator:
    """The host's side of a kernel, of one family: what an operator takes, allocates, launches and computes on the CPU.

    Families derive from this, each with the spec of what is computed and the launch that was chosen.
    """

    function: str  # its name in a package
    schema: str  # of the operator, as torch.library takes it: "(Tensor x) -> (Tensor, Tensor)"
    opaque = False  # whether the compiler must not look into the launch, as it calls torch in between
    flops = 0  # of its products, for each row of the first argument

    def outputs(self, *arguments: Any) -> Any:
        """The results, allocated but not filled, after a check of the arguments: raises InputError.

        Also tells the compiler their shapes and dtypes, so that sizes may be symbolic. M is free in shapes, and P is
        the number of programs that a kernel is launched with.
        """
        raise NotImplementedError

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        """Fill the results on a GPU, by the Triton kernels of a package's module `kernels`, each with `launch`.

        What is launched follows from the shapes, strides and dtypes of the arguments.
        """
        raise NotImplementedError

    def reference(self, *arguments: Any) -> Any:
        """The results in torch: what runs on the CPU, and what a kernel is compared with."""
        raise NotImplementedError


def schema(parameters: Iterable[str], results: Collection[str], dtype: str = "", changed: Collection[str] = ()) -> str:
    """A schema of tensors by name, and `dtype` as the last parameter: "ScalarType? dtype=None"."""
    tensors = [f"Tensor{'(a!)' if name in changed else ''} {name}" for name in parameters]
    taken = ", ".join([*tensors, dtype] if dtype else tensors)
    return f"({taken}) -> {'Tensor' if len(results) == 1 else '(' + ', '.join(['Tensor'] * len(results)) + ')'}"


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
    inside a torch.autograd.Function. The function has `operator`, and its `reference`, as
    attributes.
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
        if runs_directly() and is_plain(arguments) and first_of(arguments).is_cuda:
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
    """True in plain eager mode, where nothing but the GPU has to see a call."""
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


MOST_PREPARED = 256  # calls of an operator that differ in shapes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call for arguments of some shapes: what is allocated, and what is launched on which of the tensors."""

    results: tuple[tuple[tuple[Any, ...], torch.dtype], ...]  # shape and strides, and dtype
    form: type  # of the results: a tuple, a list, or one tensor
    launches: tuple[tuple[Any, ...], ...]  # kernel, grid, arguments but tensors, places of those, constants, warps


class DirectCalls:
    """Calls of one operator in plain eager mode on a GPU.

    The first call with arguments of some shapes, strides and dtypes checks them and records what it allocates and
    launches; further ones do the same again, which takes the host half the time. A call that makes further tensors in
    between, such as contiguous copies, is not recorded.
    """

    def __init__(self, operator: KernelOperator, kernels: Callable[[], Any]) -> None:
        self._operator, self._kernels = operator, kernels
        self._prepared: dict[Any, _Prepared | None] = {}

    def __call__(self, *arguments: Any) -> Any:
        flat = flattened(arguments)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        device = first_of(arguments).device
        key = (device, *[(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in flat])
        prepared = self._prepared.get(key)
        if prepared is None:
            return self._first(key, arguments, tensors)
        made = [torch.empty_strided(*size, dtype=dtype, device=device) for size, dtype in prepared.results]
        tensors += made
        for kernel, grid, given, places, constants, warps in prepared.launches:
            there = list(given)
            for position, place in places:
                there[position] = tensors[place]
            launch(kernel, grid, *there, constants=constants, num_warps=warps)
        return made[0] if prepared.form is Tensor else tuple(made) if prepared.form is tuple else made

    def _first(self, key: Any, arguments: Sequence[Any], tensors: list[Tensor]) -> Any:
        results = self._operator.outputs(*arguments)
        known = [*tensors, *listed(results)]
        places = {id(tensor): place for place, tensor in enumerate(known)}
        launches: list[tuple[Any, ...]] = []
        repeatable = len(places) == len(known)  # one tensor in two places could be two the next time

        def recorded(kernel: Any, grid: Any, *given: Any, constants: tuple[object, ...] = (), num_warps: int) -> None:
            nonlocal repeatable
            launch(kernel, grid, *given, constants=constants, num_warps=num_warps)
            at = [(i, places.get(id(x))) for i, x in enumerate(given) if isinstance(x, Tensor)]
            repeatable = repeatable and all(place is not None for _, place in at)
            numbers = tuple([None if isinstance(x, Tensor) else x for x in given])
            launches.append((kernel, grid, numbers, tuple(at), constants, num_warps))

        self._operator.launch(self._kernels(), listed(results), arguments, recorded)
        if repeatable and launches:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            made = tuple(((tensor.shape, tensor.stride()), tensor.dtype) for tensor in listed(results))
            form = Tensor if isinstance(results, Tensor) else type(results)
            self._prepared[key] = _Prepared(made, form, tuple(launches))
        return results


def listed(results: Any) -> Sequence[Tensor]:
    """An operator's results as a sequence."""
    return (results,) if isinstance(results, Tensor) else results


def is_plain(arguments: Sequence[Any]) -> bool:
    """True if no argument, nor a tensor in a list, stands for others."""
    return _PLAIN.issuperset(map(type, flattened(arguments)))


def flattened(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, those of lists one by one."""
    if list not in map(type, arguments):
        return list(arguments)
    return [x for a in arguments for x in (a if type(a) is list else (a,))]


def first_of(arguments: Sequence[Any]) -> Tensor:
    """The first tensor of an operator's arguments, which may be in a list."""
    first: Tensor = arguments[0][0] if type(arguments[0]) is list else arguments[0]
    return first


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


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, constants: tuple[object, ...] = (), num_warps: int
) -> None:
    """Launch a Triton kernel on tensors and integers, in the order of its parameters; the first is a tensor.

    None stands for a tensor that is not there.

    `constants` are the last parameters, those that are `tl.constexpr`.

    Where AOTAutograd traces, the launch becomes a node of its graph. Otherwise the compiled kernel is remembered for
    each set of what Triton specialises on (dtypes, alignment, divisibility), and later launches skip Triton's own
    binding of arguments, which costs the host more than the launch.
    """
    if decomposition.is_traced(arguments[0]):
        decomposition.launch(kernel, grid, *arguments, *constants, num_warps=num_warps)
        return
    device = arguments[0].get_device()
    key = (device, num_warps, constants, *_specialization(arguments))
    compiled_kernels = kernel.__dict__.setdefault("loka_compiled", {})
    compiled = compiled_kernels.get(key)
    if compiled is not None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[(*grid, 1, 1)](*arguments, *constants, stream=stream)
        return
    compiled = kernel[grid](*arguments, *constants, num_warps=num_warps)
    if hasattr(compiled, "packed_metadata"):  # not so under Triton's interpreter
        compiled_kernels[key] = compiled


def _specialization(arguments: Iterable[Any]) -> list[object]:
    """What Triton compiles a kernel for: at least all that two different kernels can differ in."""
    found: list[object] = []
    for argument in arguments:
        if type(argument) is int:
            found += argument == 1, argument % 16 == 0, argument >> 31
        elif argument is None:
            found.append(None)
        else:
            found += argument.dtype, argument.data_ptr() % 16
    return found


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


def check_rows(x: Tensor, width: int, rows: int | None = None) -> None:
    """Raises InputError unless x is a floating matrix of (M, width), with M = `rows` if given.

    Where a graph is traced, numbers of rows that come from data are not compared: the operator is opaque then, and
    compares them when it runs.
    """
    if rows is not None and x.dim() == 2 and _differ(x.shape[0], rows):
        raise InputError(
            f"a kernel for matrices of {rows} rows got one of shape {tuple(x.shape)}; the package was generated for "
            "inputs that are not broadcast: give them as many rows"
        )
    if x.dim() != 2 or x.shape[1] != width or not x.dtype.is_floating_point:
        raise InputError(
            f"a kernel for floating rows of {width} elements got {x.dtype} of shape {tuple(x.shape)}; the model is "
            "not the one that the package was generated for, generate it again"
        )


def width_of(x: Tensor, widths: Collection[int]) -> int:
    """The width of x (M, width). Raises InputError unless x is a floating matrix, and the width one of `widths`."""
    if x.dim() == 2 and x.dtype.is_floating_point:
        width = int(x.shape[1])
        if width in widths:
            return width
    *first, last = map(str, widths)
    raise InputError(
        f"a kernel for floating rows of {', '.join(first)} or {last} elements got {x.dtype} of shape {tuple(x.shape)}; "
        "the model is not the one that the package was generated for, generate it again"
    )


def check_vectors(width: int, *vectors: Tensor) -> None:
    """Raises InputError unless each vector has `width` elements."""
    for vector in vectors:
        if vector.numel() != width:
            raise InputError(
                f"a kernel for rows of {width} elements got a vector of shape {tuple(vector.shape)}; the model is not "
                "the one that the package was generated for, generate it again"
            )


def check_sample(x: Tensor, embeddings: int, dim: int) -> None:
    """Raises InputError unless x is floating and (B, embeddings, dim)."""
    if x.dim() != 3 or x.shape[1:] != (embeddings, dim) or not x.dtype.is_floating_point:
        raise InputError(
            f"a kernel for samples of {embeddings} embeddings of {dim} elements got {x.dtype} of shape "
            f"{tuple(x.shape)}; the model is not the one that the package was generated for, generate it again"
        )


def check_joined(*parts: Tensor, width: int) -> None:
    """Raises InputError unless each part is floating and (B, n_i, width)."""
    for part in parts:
        if part.dim() != 3 or part.shape[2] != width or not part.dtype.is_floating_point:
            raise InputError(
                f"a kernel that joins rows of {width} elements got {part.dtype} of shape {tuple(part.shape)}; the "
                "model is not the one that the package was generated for, generate it again"
            )


def whole_rows(x: Tensor) -> Tensor:
    """x (M, N) unchanged if each row is contiguous, whatever the row stride; otherwise a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def whole_samples(x: Tensor) -> Tensor:
    """x (B, n, d) unchanged if each sample is contiguous, whatever the batch stride; otherwise a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check_matrix(x: Tensor) -> None:
    """Raises InputError unless x is a floating matrix."""
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise InputError(f"a kernel for a floating matrix got {x.dtype} of shape {tuple(x.shape)}; reshape it first")


def check_scale(scale: Tensor) -> None:
    """Raises InputError unless a static scale is a single float32 number in a tensor; its value is not read."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise InputError(
            f"a kernel with a static scale needs it as one float32 number, not {scale.dtype} of shape "
            f"{tuple(scale.shape)}; make it as torch.full((1, 1), scale, device=x.device)"
        )


def check_overflow_stats(overflow_stats: Tensor) -> None:
    """Raises InputError unless the overflow statistics are (2,) int64; their values are not read."""
    if overflow_stats.shape != (2,) or overflow_stats.dtype != torch.int64:
        raise InputError(
            "a kernel that counts what a scale does not hold needs overflow_stats of two int64, not "
            f"{overflow_stats.dtype} of shape {tuple(overflow_stats.shape)}; make them as torch.zeros(2, "
            "dtype=torch.int64, device=x.device)"
        )


def _on_its_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` with the first argument's device as the current one, where Triton launches."""
    device = first_of(arguments).get_device()
    if device == torch._C._cuda_getDevice():
        return function(*arguments)
    with torch.cuda.device(device):
        return function(*arguments)


def _differ(size: int, other: int) -> bool:
    """size != other, which becomes a guard where both are symbolic; False where that is not known before data are."""
    if type(size) is int and type(other) is int:
        return size != other
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes half a second, for sympy

    return guard_or_false(size != other)


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
