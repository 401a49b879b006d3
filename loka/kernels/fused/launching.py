"""Launches of Triton kernels, and calls of operators in plain eager mode, which repeat what they have prepared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loka.errors import LokaError
from loka.kernels import decomposition

if TYPE_CHECKING:
    from loka.kernels.fused.operators import KernelOperator

Launch = Callable[..., Any]  # `launch`, or what records its calls
MOST_PREPARED = 256  # calls of an operator that differ in shapes


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, constants: tuple[object, ...] = (), num_warps: int
) -> None:
    """Launch a Triton kernel on tensors and integers, in the order of its parameters; the first is a tensor.

    None stands for a tensor that is not there; `constants` are the last parameters, those that are `tl.constexpr`.

    Where AOTAutograd traces, the launch becomes a node of its graph. Otherwise the compiled kernel is remembered for
    each set of what Triton specialises on (dtypes, alignment, divisibility), and later launches skip Triton's own
    binding of arguments, which costs the host more than the launch. `num_warps` are of 32 threads; AMD's have 64.
    """
    if torch.version.hip is not None:
        num_warps = max(1, num_warps // 2)
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


def launch_by_name(
    launch: Launch, kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any], num_warps: int
) -> None:
    """`launch` a kernel on values for its parameters, by their names: a tensor NAME is that of NAME_ptr.

    Constants, in capitals, are the last parameters; a pointer without a tensor is None. Raises LokaError for a value
    that the kernel has no parameter for.
    """
    names = [name.removesuffix("_ptr") for name in kernel.arg_names]
    if not values.keys() <= set(names):
        raise LokaError(f"a kernel has no parameters for {values.keys() - set(names)}; it has {names}")
    passed = [values.get(name) if f"{name}_ptr" in kernel.arg_names else values[name] for name in names]
    first = next((place for place, name in enumerate(names) if name.isupper()), len(names))
    launch(kernel, grid, *passed[:first], constants=tuple(passed[first:]), num_warps=num_warps)


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
        device = flat[0].device
        key = (device, *[(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in flat])
        prepared = self._prepared.get(key)
        if prepared is None:
            return self._first(key, arguments, tensors)
        made = [torch.empty_strided(*size, dtype=dtype, device=device) for size, dtype in prepared.results]
        tensors += made
        for kernel, grid, given, places, constants, warps in prepared.launches:
            passed = list(given)
            for position, place in places:
                passed[position] = tensors[place]
            launch(kernel, grid, *passed, constants=constants, num_warps=warps)
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


def flattened(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, those of lists one by one."""
    if list not in map(type, arguments):
        return list(arguments)
    return [x for a in arguments for x in (a if type(a) is list else (a,))]
