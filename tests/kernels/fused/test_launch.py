"""Eager launches: a compiled kernel is used again for the same specialisation only, and what runs directly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels.fused import operators


class Kernel:
    """Stands for a Triton kernel: remembers what was compiled and what was launched."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, int]] = []
        self.launched: list[tuple[int, tuple[int, ...]]] = []  # number of the compiled kernel, grid

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: object, **options: int) -> Compiled:
            self.compiled.append(options)
            made = Compiled(self, len(self.compiled) - 1)
            made[(*grid, 1, 1)](*arguments, stream=STREAM)
            return made

        return run


class Compiled:
    packed_metadata = ()

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, stream: self.kernel.launched.append((self.number, grid))


STREAM = 7


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device and its stream, which a torch without CUDA does not have."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def numbers(kernel: Kernel) -> list[int]:
    return [number for number, _ in kernel.launched]


def test_a_second_launch_uses_the_compiled_kernel(kernel: Kernel) -> None:
    x = torch.zeros(64, 32)
    for rows in (64, 32, 96):
        operators.launch(kernel, (rows,), x, rows, num_warps=4)
    assert kernel.compiled == [{"num_warps": 4}]
    assert kernel.launched == [(0, (64, 1, 1)), (0, (32, 1, 1)), (0, (96, 1, 1))]


ALIGNED = torch.zeros(64)


@pytest.mark.parametrize(
    "other",
    [(ALIGNED.half(), 32), (ALIGNED[1:], 32), (ALIGNED, 33), (ALIGNED, 1), (ALIGNED, 1 << 40)],
    ids=["dtype", "address", "not by 16", "one", "64 bits"],
)
def test_what_triton_specialises_on_is_compiled_anew(kernel: Kernel, other: tuple[Tensor, int]) -> None:
    usual = (ALIGNED, 32)
    for tensor, number in (usual, other, usual, other):
        operators.launch(kernel, (1,), tensor, number, num_warps=4)
    assert numbers(kernel) == [0, 1, 0, 1]


def test_warps_and_devices_have_kernels_of_their_own(kernel: Kernel) -> None:
    first, second = (
        SimpleNamespace(get_device=lambda index=index: index, dtype=torch.float32, data_ptr=lambda: 0)
        for index in (0, 1)
    )
    for tensor, warps in ((first, 4), (first, 8), (second, 4), (second, 4), (first, 4)):
        operators.launch(kernel, (1,), tensor, num_warps=warps)
    assert numbers(kernel) == [0, 1, 2, 2, 0]


def test_constants_come_last_and_have_kernels_of_their_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        Compiled, "__getitem__", lambda self, grid: lambda *a, stream: given.append((self.number, *a[1:]))
    )
    for constants in ((256, 4), (256, 8), (256, 4), (4, 256)):
        operators.launch(kernel, (1,), ALIGNED, 32, constants=constants, num_warps=4)
    assert given == [(0, 32, 256, 4), (1, 32, 256, 8), (0, 32, 256, 4), (2, 32, 4, 256)]


def test_what_is_not_a_compiled_kernel_is_not_kept(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter returns None from a launch."""
    monkeypatch.delattr(Compiled, "packed_metadata")
    for _ in range(2):
        operators.launch(kernel, (1,), ALIGNED, num_warps=4)
    assert len(kernel.compiled) == 2


class PlusOne(operators.KernelOperator):
    schema = "(Tensor x) -> Tensor"

    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def outputs(self, x: object) -> object:
        return torch.empty_like(x) if isinstance(x, Tensor) else ["result"]

    def launch(self, kernels: object, results: object, arguments: object) -> None:
        self.seen.append((kernels, results, arguments))

    def reference(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture
def direct_or_not(monkeypatch: pytest.MonkeyPatch):
    """A generated function on a stand-in for a GPU, and its direct calls."""
    monkeypatch.setattr(operators, "_PLAIN", operators._PLAIN | {SimpleNamespace})
    seen: list[object] = []
    return operators.define("direct_or_not", PlusOne(seen), lambda: "kernels"), seen


PRETENDED = SimpleNamespace(is_cuda=True, get_device=lambda: 0)


def test_a_plain_call_on_a_gpu_is_direct(direct_or_not) -> None:
    run, seen = direct_or_not
    assert run(PRETENDED) == ["result"]
    assert seen == [("kernels", ["result"], (PRETENDED,))]


def test_a_dispatch_mode_sees_the_operator(direct_or_not) -> None:
    run, seen = direct_or_not
    with TorchDispatchMode(), pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
        run(PRETENDED)  # the operator takes tensors only
    assert not seen


def test_so_does_what_traces(direct_or_not, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = direct_or_not
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
        run(PRETENDED)
    assert not seen


def test_so_does_a_tensor_that_stands_for_others(direct_or_not) -> None:
    run, seen = direct_or_not

    class Wrapper(Tensor):
        pass

    wrapped = torch.zeros(2).as_subclass(Wrapper)
    with pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
        run(PRETENDED, wrapped)
    assert not seen


def test_the_reference_runs_on_the_cpu(direct_or_not) -> None:
    run, seen = direct_or_not
    assert run(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert not seen


def test_a_package_of_another_version_is_told_to_be_generated_again() -> None:
    """Up to 0.1 packages registered their kernels by `operators.operator`."""
    with pytest.raises(AttributeError, match="generated by another version of LoKA; generate it again"):
        exec("from loka.kernels.fused import operators\noperators.operator('name', None, None, None)", {})  # noqa: S102
