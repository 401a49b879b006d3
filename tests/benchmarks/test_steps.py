"""One variant's step, on the CPU: what it computes, what it is made of, and what becomes of failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.cells import Cell, Errors, MeasuredStep
from benchmarks.packages import BuiltPackage, Learn, StudyWorkshop, Subject
from benchmarks.region import region_run
from benchmarks.region.region_run import RegionComparison, compare
from benchmarks.replays import Timing
from benchmarks.steps import StepWork, errors_of, learned, make_work, measure, output_gradient, user_step
from benchmarks.variants import VARIANTS, Variant, prepare
from loka.bench.model.whole_step import Example
from loka.bench.peers import PeerMissingError
from loka.dispatch.dispatch_errors import VerifyError
from loka.errors import InputError, LokaError
from tests.support.bench_device import CpuBench

BY_NAME = {variant.name: variant for variant in VARIANTS}
OURS = tuple(variant for variant in VARIANTS if variant.generated)
SIZE = 128
SUBJECT = Subject(
    "small",
    f"""\
import torch
from torch import Tensor, nn


def build():
    return nn.Sequential(nn.LayerNorm({SIZE}), nn.Linear({SIZE}, {SIZE}), nn.SiLU())


def inputs(batch_size):
    return (torch.randn(batch_size, {SIZE}, requires_grad=True),)
""",
    32,
)

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")


@pytest.fixture(scope="module")
def workshop() -> Iterator[StudyWorkshop]:
    with StudyWorkshop() as made:
        yield made


@pytest.fixture
def work() -> StepWork:
    torch.manual_seed(0)
    base = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.SiLU())
    return make_work("small", base, (torch.randn(32, SIZE),), (True, False), 1)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The compiler that `measure` needs, taken out; gives each `fullgraph` that was asked for."""
    asked: list[bool] = []

    def compiled(model: nn.Module, fullgraph: bool) -> nn.Module:
        asked.append(fullgraph)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    return asked


def test_work_holds_values_of_bfloat16_and_its_reference_is_autograds(work: StepWork) -> None:
    for value in (*work.inputs, *work.base.parameters()):
        assert torch.equal(value.bfloat16().float(), value)
    assert work.leaves == ("x", "0.weight", "0.bias", "1.weight", "1.bias")
    x = work.inputs[0].clone().requires_grad_()
    out = work.base(x)
    grads = torch.autograd.grad(out, [x, *work.base.parameters()], output_gradient(out))
    for found, expected in zip(work.reference[True], (out, *grads), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(work.reference[False]) == 1
    torch.testing.assert_close(work.reference[False][0], out)


def test_the_output_gradient_is_the_same_in_every_precision() -> None:
    one, other = (output_gradient(torch.zeros(4, 8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert one.dtype == torch.float32
    assert torch.equal(one, other.float())
    assert one.std() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["tf32", "bf16", "loka-bf16", "loka-fp8", "loka-fp8-fast", "loka-fp8-known"])
def test_every_variant_computes_the_same_function(
    work: StepWork, workshop: StudyWorkshop, on_the_cpu: list[bool], name: str, training: bool
) -> None:
    variant = BY_NAME[name]
    before = {key: value.clone() for key, value in work.base.state_dict().items()}
    package = workshop.make(SUBJECT, variant, partial(learned, work)).package if variant.generated else None
    device = CpuBench(replay_ms=[0.001, 0.002, 0.003])
    found = measure(work, variant, training, package, device=device)
    assert (found.timing.median_us, found.timing.samples) == (pytest.approx(2.0), 3)
    assert device.measured == [work.milliseconds]
    assert found.peak_mib == (2.0 if training else None)
    assert found.errors is not None
    least = {"tf32": 100.0, "bf16": 35.0, "loka-bf16": 35.0}.get(name, 20.0)
    assert found.errors.output is not None
    assert found.errors.output > least
    assert (found.errors.gradient is not None) == training
    if training:
        assert found.errors.gradient > min(least, 25.0) - 3
        assert found.errors.gradient_of in work.leaves
    if variant.precision.is_fp8:
        assert found.errors.output < 45.0  # FP8 did run
    assert on_the_cpu == [variant.generated]
    assert type(work.base) is nn.Sequential
    assert all(torch.equal(value, before[key]) for key, value in work.base.state_dict().items())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_planned_gemms_that_do_not_run_are_an_error(
    work: StepWork, workshop: StudyWorkshop, on_the_cpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = workshop.make(SUBJECT, BY_NAME["loka-fp8"]).package
    untouched = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.SiLU()).bfloat16()
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: untouched)
    with pytest.raises(VerifyError):
        measure(work, BY_NAME["loka-fp8"], False, package, device=CpuBench())


def test_errors_are_those_of_the_output_and_of_the_worst_gradient() -> None:
    expected = [torch.ones(4), torch.ones(4), torch.ones(4)]
    found = [torch.full((4,), 1.1), torch.full((4,), 1.01), torch.full((4,), 1.001)]
    errors = errors_of(found, expected, ("x", "weight"))
    assert errors == Errors(pytest.approx(20.0, abs=1e-3), pytest.approx(40.0, abs=1e-2), "x")
    assert errors_of(found[:1], expected[:1], ("x", "weight")).gradient is None


def test_work_that_cannot_be_set_up_fails_in_every_cell() -> None:
    said: list[str] = []

    def failing() -> RegionComparison:
        raise RuntimeError("out of memory")

    cells = compare("work", failing, VARIANTS, (True, False), said.append)
    failure = "RuntimeError: out of memory"
    expected = tuple(Cell("work", variant.name, None, failure=failure) for variant in VARIANTS)
    assert cells == {True: expected, False: expected}
    assert said == [f"work: failed: {failure}"]


def test_a_comparison_generates_each_package_once(monkeypatch: pytest.MonkeyPatch, work: StepWork) -> None:
    made: list[str] = []

    class Counting(StudyWorkshop):
        def make(self, subject: Subject, variant: Variant, learn: Learn | None = None) -> BuiltPackage:
            made.append(variant.name)
            return BuiltPackage(ModuleType(variant.name), SimpleNamespace())  # type: ignore[arg-type]

    def measured(work: StepWork, variant: Variant, training: bool, package: ModuleType | None) -> MeasuredStep:
        assert (package.__name__ if package else "") == (variant.name if variant.generated else "")
        return MeasuredStep(Timing(1.0, 1.0, 1.0, 1), None, None)

    def bound(variant: Variant, training: bool) -> float:
        return 2.0 if training else 1.0

    monkeypatch.setattr(region_run, "measure", measured)
    with Counting() as shop:
        compared = RegionComparison(work, SUBJECT, shop, bound, lambda line: None)
        cells = [*compared.cells(VARIANTS, True), *compared.cells(VARIANTS, False)]
    assert made == [variant.name for variant in OURS]
    assert [cell.variant for cell in cells] == [variant.name for variant in VARIANTS] * 2
    assert [cell.bound_us for cell in cells] == [2.0] * len(VARIANTS) + [1.0] * len(VARIANTS)


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    for training in (True, False):
        with pytest.raises(PeerMissingError, match=r"torchao is not installed .*pip install 'loka\[torchao\]'"):
            prepare(BY_NAME["torchao-rowwise"], nn.Linear(512, 512), training, None)


class Recorded:
    """Stands for torchao: what it was asked, and for which linears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        float8, quantization = ModuleType("torchao.float8"), ModuleType("torchao.quantization")
        float8.Float8LinearConfig = SimpleNamespace(from_recipe_name=lambda name: name)  # type: ignore[attr-defined]
        float8.convert_to_float8_training = self.convert  # type: ignore[attr-defined]
        quantization.PerRow, quantization.PerTensor = (lambda: "rows"), (lambda: "tensor")  # type: ignore[attr-defined]
        quantization.Float8DynamicActivationFloat8WeightConfig = lambda granularity: granularity  # type: ignore[attr-defined]
        quantization.quantize_ = self.quantize  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
        monkeypatch.setitem(sys.modules, "torchao.float8", float8)
        monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)

    def convert(self, model: nn.Module, config: str, module_filter_fn: Callable[[nn.Module, str], bool]) -> nn.Module:
        self.asked.append((config, [name for name, part in model.named_modules() if module_filter_fn(part, name)]))
        return model

    def quantize(self, model: nn.Module, config: str, filter_fn: Callable[[nn.Module, str], bool]) -> None:
        self.asked.append((config, [name for name, part in model.named_modules() if filter_fn(part, name)]))


def test_torchao_is_asked_for_wide_linears_in_the_recipe_of_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    sizes = [(512, 512), (496, 512), (512, 24), (528, 16), (3456, 512)]

    def model() -> nn.Module:
        return nn.ModuleDict({f"{k}x{n}": nn.Linear(k, n) for k, n in sizes} | {"norm": nn.LayerNorm(512)})

    for name in ("torchao-tensorwise", "torchao-rowwise"):
        for training in (True, False):
            ready = prepare(BY_NAME[name], model(), training, None)
            assert next(ready.model.parameters()).dtype == torch.bfloat16
            assert ready.model.training is training
            ready.verify(training)
    wide = ["512x512", "528x16", "3456x512"]
    assert recorded.asked == [("tensorwise", wide), ("tensor", wide), ("rowwise", wide), ("rows", wide)]


def test_a_package_in_which_nothing_can_be_fp8_is_refused(workshop: StudyWorkshop) -> None:
    narrow = Subject("narrow", SUBJECT.source.replace(str(SIZE), "32"), 32)
    with pytest.raises(LokaError, match="no GEMM can run in FP8: "):
        workshop.make(narrow, BY_NAME["loka-fp8"])


def test_a_package_that_replaces_nothing_is_refused(workshop: StudyWorkshop) -> None:
    source = SUBJECT.source.replace(f"nn.LayerNorm({SIZE}), ", "").replace(", nn.SiLU()", "")
    with pytest.raises(LokaError, match="nothing is replaced: "):
        workshop.make(Subject("bare", source, 32), BY_NAME["loka-bf16"])


def test_a_workshop_leaves_nothing_behind() -> None:
    path = list(sys.path)
    with StudyWorkshop() as made:
        factory, inputs = made.add(SUBJECT)
        assert (factory, inputs) == (
            f"{made.folder.name}.loka_bench_small:build",
            f"{made.folder.name}.loka_bench_small:inputs",
        )
        package = made.make(SUBJECT, BY_NAME["loka-fp8"]).package
        assert sys.modules[package.__name__] is package
    assert sys.path == path
    assert not [name for name in sys.modules if name == package.__name__ or name.startswith(f"{package.__name__}.")]


class Two(nn.Module):
    """Two outputs, one of them without a gradient; one Parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.unread = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, ids: Tensor) -> dict[str, Any]:
        return {"score": x[ids] * self.weight, "seen": [ids]}


def example() -> Example:
    x = torch.tensor([[1.0, 2.0], [5.0, 7.0]], requires_grad=True)
    return Example((x,), {"ids": torch.tensor([1, 1])})


def test_a_training_step_gives_outputs_and_the_gradients_that_there_are() -> None:
    model, inputs = Two(), example().fresh("cpu", torch.float32, training=True)
    score, ids, by_input, by_weight = user_step(model, inputs, True, model)()
    assert score.tolist() == [[10.0, 21.0], [10.0, 21.0]]
    assert ids.tolist() == [1, 1]
    out = model(*inputs.args, **inputs.kwargs)["score"]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    expected = torch.autograd.grad(out, [inputs.args[0], model.weight], grad)
    torch.testing.assert_close((by_input, by_weight), expected)


def test_an_inference_gives_the_outputs_without_gradients() -> None:
    model = Two()
    score, _ = user_step(model, example().fresh("cpu", torch.float32, False), False, model)()
    assert not score.requires_grad


def test_a_model_without_a_gradient_has_no_training_step() -> None:
    model = nn.Flatten()
    with pytest.raises(InputError, match="no training step to measure"):
        user_step(model, Example((torch.ones(2, 2),), {}), True, model)
