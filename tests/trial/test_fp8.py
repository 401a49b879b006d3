"""`loka.fp8`: a model of one's own, in one call: what it says, and that it is what the policy way gives."""

from __future__ import annotations

import importlib
import logging
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import loka
from loka.cli import main
from loka.dispatch import LokaWarning, Patch
from loka.errors import Code, InputError, LokaError
from loka.plan.plan import Plan
from loka.plan.planner import read_plan
from loka.plan.view.verdict import verdict
from loka.zoo import ranker_inputs, small_ranker
from tests.support.importing import import_folder

pytestmark = pytest.mark.slow

SHOP = '''
import torch
from torch import nn


class Shop(nn.Module):
    """A multi-task ranker of one's own: BatchNorm, dropout, a dict for a batch, two heads."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(100, 64)
        self.bottom = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(192, 128), nn.ReLU()) for _ in range(2))
        self.click = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
        self.buy = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        x = torch.cat([self.bottom(batch["dense"]), self.items(batch["item"])], 1)
        shared = sum(expert(x) for expert in self.experts)
        return {"click": self.click(shared).squeeze(1), "buy": self.buy(shared).squeeze(1)}


def build():
    torch.manual_seed(0)
    return Shop()


def example_inputs(batch_size):
    drawn = torch.Generator().manual_seed(1)
    dense, item = torch.randn(256, 64, generator=drawn), torch.randint(100, (256,), generator=drawn)
    return {"dense": dense[:batch_size], "item": item[:batch_size]}


def frozen():
    return build().requires_grad_(False)
'''
CLICKS = torch.arange(256).remainder(2).float()


@pytest.fixture(autouse=True)
def no_shipped_measurements() -> None:
    """The plans for a GPU here are decided by the measurements that ship."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be written there; temporary folders are seen."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the user's own model, which is not in the current directory."""
    (tmp_path / "my_pkg.py").write_text(SHOP, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_pkg", None)
    yield importlib.import_module("my_pkg")
    sys.modules.pop("my_pkg", None)


def loss(output: dict[str, Tensor]) -> Tensor:
    return sum((F.binary_cross_entropy_with_logits(each, CLICKS) for each in output.values()), torch.zeros(()))


def plan_of(patch: Patch) -> Plan:
    return read_plan(Path(str(sys.modules[patch.package].__file__)).with_name("plan.json"))


def tower(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 64), nn.Linear(64, 1))


def rows(count: int = 256, width: int = 64) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(2))


def stepped(model: nn.Module, batch: Any) -> list[Tensor]:
    """The outputs and gradients of one step, with the same dropout each time."""
    torch.manual_seed(3)
    output = model(batch)
    loss(output).backward()
    return [*output.values(), *(each.grad for each in model.parameters() if each.grad is not None)]


def by_policy(patch: Patch, record: Callable[[Path], None]) -> tuple[Plan, Any]:
    """The plan and the package of the policy that a patch tells, by files, as it tells to keep it."""
    path = Path("policies/shop.yaml")
    path.parent.mkdir()
    path.write_text(patch.policy, encoding="utf-8")
    record(path)
    made = CliRunner().invoke(main.app, ["probe", str(path), "--from", "shop.full.safetensors"])
    assert made.exit_code == 0, made.output
    generated = loka.generate(path, "generated_shop")
    return generated.plan, import_folder(Path("generated_shop").resolve())


def test_a_step_is_that_of_the_policy_way_to_the_bit(shop: Any) -> None:
    batch = shop.example_inputs(256)
    model = shop.build()
    patch = loka.fp8(model, batch, loss=loss)

    def record(path: Path) -> None:
        recorded = shop.build()
        with loka.Probe(recorded, path, every=1, rows=512, path="shop.full.safetensors") as probe:
            torch.manual_seed(0)
            loss(recorded(batch)).backward()
            probe.step()

    plan, package = by_policy(patch, record)
    assert plan.sites == plan_of(patch).sites
    assert plan.share_fp8 > 0.9
    other = shop.build()
    package.apply(other)
    for one, two in zip(stepped(model, batch), stepped(other, batch), strict=True):
        assert torch.equal(one, two)
    patch.verify()


def test_inference_is_that_of_the_policy_way_to_the_bit(shop: Any) -> None:
    batch = shop.example_inputs(256)
    model = shop.build().eval()
    patch = loka.fp8(model, batch, mode="infer")

    def record(path: Path) -> None:  # as the report says
        text = path.read_text(encoding="utf-8").replace("my_pkg:build", "my_pkg:frozen")
        path.write_text(text, encoding="utf-8")
        recorded = shop.frozen().eval()
        with loka.Probe(recorded, path, every=1, rows=512, path="shop.full.safetensors") as probe:
            recorded(batch)
            probe.step()

    plan, package = by_policy(patch, record)
    assert plan.sites == plan_of(patch).sites
    other = shop.build().eval()
    package.apply(other, mode="infer")
    with torch.no_grad():
        found, expected = model(batch), other(batch)
    assert all(torch.equal(found[head], expected[head]) for head in found)
    patch.verify(backward=False)
    assert "one forward of 256 samples" in patch.report
    assert "no evidence for training" not in patch.report
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "given", [{"loss": loss}, {"loss": loss, "target": "h100"}], ids=["training", "with mods that merge"]
)
def test_the_model_and_the_folder_are_as_they_were(shop: Any, tmp_path: Path, given: dict[str, Any]) -> None:
    model = shop.build()
    model.click[0].weight.grad = torch.ones(64, 128)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes, modes = [type(module) for module in model.modules()], [module.training for module in model.modules()]
    random, batch = torch.get_rng_state(), shop.example_inputs(256)
    patch = loka.fp8(model, batch, **given)
    assert patch.sites
    assert ("merge_siblings gains" in patch.report) == ("target" in given)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert list(grads) == ["click.0.weight"]
    assert torch.equal(grads["click.0.weight"], torch.ones(64, 128))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(batch[key], each) for key, each in shop.example_inputs(256).items())
    assert not list(Path().iterdir())
    (folder,) = (tmp_path / "temporary").glob("loka*")  # a compiler may have one there, too
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [name for name in sys.modules if name.startswith("loka_live_model")]
    patch.remove()
    assert [type(module) for module in model.modules()] == classes


def test_a_wukong_on_the_planned_device() -> None:
    """Its plan fuses, and so it is bound although FP8 itself would not gain at this size."""
    torch.manual_seed(0)
    model = small_ranker()
    with pytest.warns(LokaWarning, match="the model is on cpu") as warned:
        patch = loka.fp8(model, ranker_inputs(256), target="h100")
    assert {each.filename for each in warned if issubclass(each.category, LokaWarning)} == {__file__}
    assert patch.report.startswith(f"{verdict(plan_of(patch))}.\n")
    assert "wukong_ranker for h100 at batch size 256: " in patch.report
    assert "fuse_interaction gains" in patch.report
    assert patch.sites
    model(*ranker_inputs(16)).sum().backward()


def test_the_report_says_what_and_how_to_keep_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loka"):
        patch = loka.fp8(tower(), rows())
    first, *others, last = (record.getMessage() for record in caplog.records)
    assert "seconds for a small model" in first
    assert others == [
        "loka.fp8: probing 3 GEMMs on the example",
        "loka.fp8: tracing forwards, and choosing for 3 sites",
    ]
    assert last == patch.report
    assert all(record.levelno == logging.WARNING for record in caplog.records)  # seen without any configuration
    assert patch.report.startswith("model for reference at batch size 256: 2 of 3 sites in FP8")
    assert "The model is on no GPU that LoKA knows" in patch.report
    assert 'target="h100" predicts' in patch.report
    assert "Not in FP8, and why (model.yaml is the policy below):\n  4: keep by model.yaml:" in patch.report
    assert "This is no evidence for training: give loss=" in patch.report
    assert "loka generate policies/model.yaml" in patch.report
    assert patch.report.endswith(patch.policy.rstrip())
    assert 'model: {factory: "my_pkg:build", inputs: "my_pkg:example_inputs", batch_size: 256}' in patch.policy
    assert "compute: auto" in patch.policy


def test_with_a_loss_gradients_are_its_own() -> None:
    patch = loka.fp8(tower(), rows(), loss=lambda output: output.square().mean(), target="reference")
    assert "one forward and backward of 256 samples" in patch.report
    assert "no evidence for training" not in patch.report
    assert "no GPU that LoKA knows" not in patch.report  # it was asked for
    broken = loka.fp8(tower(), rows(), loss=lambda output: 1e38 * 1e30 * output.sum())  # gradients are infinite
    assert 0 < plan_of(broken).share_fp8 < plan_of(patch).share_fp8


def test_nothing_to_gain_binds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    patch = loka.fp8(model, rows(64, 32), target="h100")
    assert patch.sites == ()
    assert type(model[0]) is nn.Linear
    assert "nothing in FP8, of 2 sites" in patch.report
    assert "Not in FP8, and why (model.yaml is the policy below):\n  0" in patch.report
    assert "BF16 is faster here" in patch.report
    assert "Nothing is to be gained, so nothing is bound." in patch.report
    assert "loka generate" not in patch.report
    with pytest.warns(LokaWarning, match="nothing in this model changes; patch.report says why"):
        patch.verify()
    patch.remove()
    loka.fp8(model, rows(64, 32), target="h100")  # there is no first patch in its way


def test_a_model_without_products() -> None:
    patch = loka.fp8(nn.Sequential(nn.Embedding(100, 8)), torch.arange(64).remainder(100))
    assert patch.sites == ()
    assert "The model has no product that could be in FP8." in patch.report


def test_several_models_in_one_process() -> None:
    models = [tower(), tower(), tower(32)]
    batches = [rows(), rows(), rows(width=32)]
    patches = [loka.fp8(model, batch) for model, batch in zip(models, batches, strict=True)]
    assert len({patch.package for patch in patches}) == 3
    outputs = [model(batch) for model, batch in zip(models, batches, strict=True)]
    assert torch.equal(outputs[0], outputs[1])
    for patch, output in zip(patches, outputs, strict=True):
        output.sum().backward()
        patch.verify()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_bound_model_is_refused_in_the_words_of_apply(mode: str) -> None:
    model = tower()
    patch = loka.fp8(model, rows(), mode=mode)
    with pytest.raises(
        loka.BindError, match=r"is bound already: remove the first patch \(patch.remove\(\)\)"
    ) as raised:
        loka.fp8(model, rows())
    assert raised.value.code is Code.OTHER_MODEL
    with pytest.raises(loka.BindError) as applied:
        sys.modules[patch.package].apply(model)
    assert {each.partition(": ")[2] for each in raised.value.problems} == {
        each.partition(": ")[2] for each in applied.value.problems
    }
    patch.remove()
    assert loka.fp8(model, rows()).sites


def test_gradients_off_around_it() -> None:
    with torch.no_grad():
        assert loka.fp8(tower(), rows()).sites
    with torch.inference_mode():
        assert loka.fp8(tower(), rows(), mode="infer").sites


SCRIPT = """\
import glob, os, sys, tempfile
import torch, loka
from torch import nn
tempfile.tempdir = sys.argv[1]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
patch = loka.fp8(model, torch.randn(64, 64))
child = os.fork()
if child == 0:
    sys.exit(0)  # its atexit functions are those of this process
os.waitpid(child, 0)
assert patch.sites and glob.glob(sys.argv[1] + "/*/generated/__init__.py")
if sys.argv[2] == "raise":
    loka.fp8(model, torch.randn(64, 3))
"""


@pytest.mark.parametrize("end", ["return", "raise"])
def test_the_folder_goes_with_the_process(tmp_path: Path, end: str) -> None:
    place = tmp_path / "temporary"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place), end], cwd=tmp_path / "here", capture_output=True, text=True
    )
    assert (run.returncode == 0) is (end == "return"), run.stderr
    assert "model for reference at batch size 64: 2 of 2 sites in FP8" in run.stderr  # without any logging set up
    assert not list(place.iterdir())
    assert not list((tmp_path / "here").iterdir())


def scripted() -> nn.Module:
    return torch.jit.script(tower())  # type: ignore[no-untyped-call, no-any-return]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tower()


MISTAKES: list[tuple[Callable[[], object], object, dict[str, Any], Code, str]] = [
    (
        lambda: torch.compile(tower()),
        rows(),
        {},
        Code.WRAPPED,
        r"compiled or wrapped \(OptimizedModule\): give loka.fp8",
    ),
    (scripted, rows(), {}, Code.WRAPPED, r"compiled or wrapped \(torch.jit"),
    (lambda: nn.DataParallel(tower()), rows(), {}, Code.WRAPPED, r"compiled or wrapped \(DataParallel\)"),
    (lambda: tower().forward, rows(), {}, Code.ARGUMENT, "takes the model, an nn.Module, not method"),
    (lambda: nn.Linear(64, 64), rows(), {}, Code.MODEL, "a bare Linear"),
    (lambda: nn.Sequential(nn.LazyLinear(64)), rows(), {}, Code.MODEL, "'0.weight' of the model is lazy"),
    (on_meta, rows(), {}, Code.MODEL, "'0.weight' of the model is on the meta device"),
    (lambda: tower().requires_grad_(False), rows(), {}, Code.MODEL, "no floating-point tensor with a gradient"),
    (tower, rows(), {"mode": "serve"}, Code.ARGUMENT, "mode must be 'train' or 'infer', not 'serve'"),
    (tower, rows(), {"target": "h1000"}, Code.VALUE, "target 'h1000' is not known"),
    (tower, "rows", {}, Code.INPUTS, "example_inputs is a str; give one tensor"),
    (tower, None, {}, Code.INPUTS, "example_inputs is a NoneType"),
    (tower, rows(3), {}, Code.INPUTS, "has 3 samples, .* give 8 or more"),
    (tower, rows(width=3), {}, Code.INPUTS, r"called with a tuple of \(256, 3\), raised RuntimeError: mat1 and mat2"),
    (tower, [rows(), rows()], {}, Code.INPUTS, r"called with a tuple of \(256, 64\) and \(256, 64\), raised TypeError"),
    (tower, {"x": rows()}, {}, Code.INPUTS, r"a dict of x: \(256, 64\), raised TypeError"),
    (tower, rows(), {"loss": 3}, Code.ARGUMENT, "loss has to be a function of what the model returns, not int"),
    (tower, rows(), {"loss": loss, "mode": "infer"}, Code.ARGUMENT, "loss is for mode='train'"),
    (
        tower,
        rows(),
        {"loss": lambda a, b: a},
        Code.CALLABLE,
        r"loss: called with \(256, 1\), .* raised TypeError.*=lambda",
    ),
    (tower, rows(), {"loss": lambda a: a}, Code.CALLABLE, r"loss: it returned a Tensor of shape \(256, 1\)"),
    (tower, rows(), {"loss": lambda a: a.detach().sum()}, Code.CALLABLE, "loss: its result has no gradient"),
]


@pytest.mark.parametrize(
    ("build", "inputs", "given", "code", "words"), MISTAKES, ids=[each[4][:30] for each in MISTAKES]
)
def test_mistakes_have_plain_words_and_a_code(
    build: Callable[[], object], inputs: Any, given: dict[str, Any], code: Code, words: str, tmp_path: Path
) -> None:
    model: Any = build()
    with pytest.raises(InputError, match=words) as raised:
        loka.fp8(model, inputs, **given)
    assert raised.value.code is code
    assert isinstance(raised.value, LokaError)
    assert "loka_live_model" not in str(raised.value)
    assert not list((tmp_path / "temporary").iterdir())  # told before anything takes long


def test_defaults_that_are_not_torchs_own_are_refused() -> None:
    """Under them a plan would be another: planning makes tensors on the CPU, in float32."""
    model, batch = tower(), rows()
    words = r"torch's defaults are .* set yours again after the call"
    with torch.device("meta"), pytest.raises(InputError, match=words) as raised:
        loka.fp8(model, batch)
    assert raised.value.code is Code.ARGUMENT
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(InputError, match=words):
            loka.fp8(model, batch)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_target_is_the_models_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.trial import trial

    class OnGpu:
        def parameters(self) -> list[Any]:
            return [type("Parameter", (), {"device": torch.device("cuda:0")})]

    live: Any = type("Live", (), {"module": OnGpu()})
    for name, target in (("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "reference")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert trial._target_of(live) == target
