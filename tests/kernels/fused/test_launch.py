"""Eager launches: a compiled kernel is used again for the same specialisation only, and what runs directly."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loka.devices.spec import ReduceLaunch
from loka.kernels.fused import launching, operators
from loka.kernels.fused.matrix_operators import ReduceOperator


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


def test_amds_warps_have_twice_the_threads(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for warps in (1, 8):
        launching.launch(kernel, (2,), torch.ones(3), num_warps=warps)
    assert [options["num_warps"] for options in kernel.compiled] == [1, 4]


def numbers(kernel: Kernel) -> list[int]:
    return [number for number, _ in kernel.launched]


def test_a_second_launch_uses_the_compiled_kernel(kernel: Kernel) -> None:
    x = torch.zeros(64, 32)
    for rows in (64, 32, 96):
        launching.launch(kernel, (rows,), x, rows, num_warps=4)
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
        launching.launch(kernel, (1,), tensor, number, num_warps=4)
    assert numbers(kernel) == [0, 1, 0, 1]


def test_warps_and_devices_have_kernels_of_their_own(kernel: Kernel) -> None:
    first, second = (
        SimpleNamespace(get_device=lambda index=index: index, dtype=torch.float32, data_ptr=lambda: 0)
        for index in (0, 1)
    )
    for tensor, warps in ((first, 4), (first, 8), (second, 4), (second, 4), (first, 4)):
        launching.launch(kernel, (1,), tensor, num_warps=warps)
    assert numbers(kernel) == [0, 1, 2, 2, 0]


def test_constants_come_last_and_have_kernels_of_their_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        Compiled, "__getitem__", lambda self, grid: lambda *a, stream: given.append((self.number, *a[1:]))
    )
    for constants in ((256, 4), (256, 8), (256, 4), (4, 256)):
        launching.launch(kernel, (1,), ALIGNED, 32, constants=constants, num_warps=4)
    assert given == [(0, 32, 256, 4), (1, 32, 256, 8), (0, 32, 256, 4), (2, 32, 4, 256)]


def test_what_is_not_a_compiled_kernel_is_not_kept(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter returns None from a launch."""
    monkeypatch.delattr(Compiled, "packed_metadata")
    for _ in range(2):
        launching.launch(kernel, (1,), ALIGNED, num_warps=4)
    assert len(kernel.compiled) == 2


class PlusOne(operators.KernelOperator):
    function = "plus_one"
    schema = "(Tensor x) -> Tensor"

    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def outputs(self, x: object) -> object:
        return torch.empty_like(x) if isinstance(x, Tensor) else ["result"]

    def launch(self, kernels: object, results: object, arguments: object, launch: object) -> None:
        self.seen.append((kernels, results, arguments))

    def reference(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture
def direct_or_not(monkeypatch: pytest.MonkeyPatch):
    """A generated function on a stand-in for a GPU, and its direct calls."""
    monkeypatch.setattr(operators, "_PLAIN", operators._PLAIN | {Pretended})
    seen: list[object] = []
    return operators.define("direct_or_not", PlusOne(seen), lambda: "kernels"), seen


class Pretended:
    is_cuda = True
    device = torch.device("cpu")

    def get_device(self) -> int:
        return 0


PRETENDED = Pretended()


def test_a_plain_call_on_a_gpu_is_direct(direct_or_not) -> None:
    run, seen = direct_or_not
    assert run(PRETENDED) == ["result"]
    assert seen == [("kernels", ["result"], (PRETENDED,))]


def test_a_dispatch_mode_sees_the_operator(direct_or_not) -> None:
    run, seen = direct_or_not
    with TorchDispatchMode(), pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
        run(PRETENDED)  # the operator takes tensors only
    assert not seen


def test_so_does_a_function_mode_but_not_that_of_a_default_device(direct_or_not) -> None:
    run, seen = direct_or_not
    with torch.device("cpu"):
        run(PRETENDED)
        assert len(seen) == 1
        with BaseTorchFunctionMode(), pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
            run(PRETENDED)
    with BaseTorchFunctionMode(), pytest.raises((TypeError, RuntimeError), match="direct_or_not"):
        run(PRETENDED)
    assert len(seen) == 1


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


class Doubles(operators.KernelOperator):
    """Launches `kernel` on its arguments and its result, and on a copy of an argument with gaps."""

    function = "doubles"
    schema = "(Tensor x, Tensor y) -> Tensor"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.checked = kernel, 0

    def outputs(self, x: Tensor, y: Tensor) -> Tensor:
        self.checked += 1
        return torch.empty(x.shape[0], 3, dtype=torch.bfloat16)

    def launch(self, kernels: object, results: tuple[Tensor], arguments: tuple[Tensor, Tensor], launch: object) -> None:
        x, y = arguments
        launch(self.kernel, (x.shape[0],), x.contiguous(), None, y, *results, x.shape[0], constants=(7,), num_warps=2)

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y)[:, :3].bfloat16()


@pytest.fixture
def doubles(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    """A direct call on the CPU, the operator, and the arguments of each launch."""
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, *rest, **named: given.append((grid, *rest)))
    operator = Doubles(kernel)
    return launching.DirectCalls(operator, lambda: None), operator, given


def test_a_second_call_of_equal_shapes_launches_the_same_on_its_own_tensors(doubles) -> None:
    call, operator, given = doubles
    for rows in (4, 4, 6, 4):
        x, y = torch.randn(rows, 2), torch.randn(5)
        made = call(x, y)
        assert (made.shape, made.dtype) == ((rows, 3), torch.bfloat16)
        grid, *rest = given.pop()
        assert grid == (rows,)
        assert [item is other for item, other in zip(rest[:4], (x, None, y, made), strict=True)] == [True] * 4
        assert rest[4] == rows
    assert operator.checked == 2


def test_a_call_that_copies_or_repeats_an_argument_is_not_prepared(doubles) -> None:
    call, operator, given = doubles
    gaps, same = torch.randn(2, 4).t(), torch.randn(4, 2)
    for x, y in ((gaps, torch.randn(5)), (same, same)):
        for _ in range(2):
            call(x, y)
    assert operator.checked == 4
    other = torch.randn(4, 2)
    call(same, other)
    assert given[-1][1] is same
    assert given[-1][3] is other


def test_strides_and_dtypes_are_checked_anew(doubles) -> None:
    call, operator, _ = doubles
    y = torch.randn(5)
    for x in (torch.randn(4, 2), torch.randn(4, 4)[:, :2], torch.randn(4, 2).double(), torch.randn(4, 2)):
        call(x, y)
    assert operator.checked == 3


def test_operands_in_a_list_are_launched_by_their_places(doubles) -> None:
    _, _, given = doubles
    call = launching.DirectCalls(ReduceOperator(3, ReduceLaunch(columns=16, rows=128, warps=8)), mock.Mock)
    for _ in range(2):
        partials = [torch.randn(4, 32), torch.randn(4, 48)]
        totals = call(partials, torch.bfloat16)
        assert [total.shape for total in totals] == [(32,), (48,)]
        (blocks,), *rest = given.pop()
        assert blocks == 5
        tensors = [item for item in rest if isinstance(item, Tensor)]
        assert list(map(id, tensors)) == [id(partials[0]), id(totals[0]), id(partials[1]), id(totals[1])]
        assert [item for item in rest if not isinstance(item, Tensor)] == [4, 32, 4, 48, None, None, 0, 0]
