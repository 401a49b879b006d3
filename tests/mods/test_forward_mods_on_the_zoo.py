"""The mods that rewrite forwards on the zoo's Wukong and DLRM-DCNv2: what there is for them, and what is not."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka import zoo
from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.policy.problems import PolicyError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

MODELS = {"ranker": zoo.ranker, "dlrm": zoo.dlrm}
Make = Callable[[str, str, str], tuple[Plan, ModuleType]]


@pytest.fixture(scope="module")
def packages() -> Iterator[dict[tuple[str, ...], tuple[Plan, ModuleType]]]:
    """What `make` made for the tests of this file, by its arguments: a plan takes most of a test's time."""
    made: dict[tuple[str, ...], tuple[Plan, ModuleType]] = {}
    yield made
    for _, package in made.values():
        for name in [
            each for each in sys.modules if each == package.__name__ or each.startswith(f"{package.__name__}.")
        ]:
            sys.modules.pop(name)


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[tuple[str, ...], tuple[Plan, ModuleType]]
) -> Make:
    """The plan of a model of the zoo under these defaults and mods, and its package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def one(model: str, defaults: str, mods: str) -> tuple[Plan, ModuleType]:
        key = (model, defaults, mods)
        if key not in packages:
            name = f"gen_zoo_{model}_{len(packages)}"
            (tmp_path / "policy.yaml").write_text(
                f'version: 1\nname: {name}\nmodel: {{factory: "loka.zoo:{model}", inputs: "loka.zoo:ranker_inputs", '
                f"batch_size: 64}}\ndefaults: {{{defaults}}}\nmods: [{mods}]\n"
            )
            plan = make_plan("policy.yaml")
            (tmp_path / name).mkdir()
            for file, text in render_package(plan).items():
                (tmp_path / name / file).write_text(text)
            importlib.invalidate_caches()
            packages[key] = plan, importlib.import_module(name)
        return packages[key]

    return one


def step(model: nn.Module, batch: int) -> dict[str, Tensor]:
    """The output and all gradients of a step."""
    torch.manual_seed(3)
    y = model(*zoo.ranker_inputs(batch))
    model.zero_grad()
    y.float().square().mean().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [64, 37])  # the last batch is an odd one
def test_padding_leaves_the_function_as_it_is(make: Make, name: str, batch: int) -> None:
    plan, package = make(name, "compute: keep", "{use: pad_alignment}")
    (mod,) = plan.mods
    padded = {each.site: each.what for each in mod.rewritten}
    assert {"K 13 padded to 16", "N 1 padded to 8"} <= set(padded.values())
    torch.manual_seed(0)
    model = MODELS[name]()
    patched = copy.deepcopy(model)
    expected = step(model, batch)
    with package.apply(patched):
        found = step(patched, batch)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key


@pytest.mark.parametrize("name", MODELS)
def test_padded_sites_of_fp8_err_as_they_did(make: Make, name: str) -> None:
    """Zeros change no scale of a row; sums in another order round to another FP8 value at times."""
    defaults = "compute: fp8, scaling: rowwise"
    torch.manual_seed(0)
    model = MODELS[name]()
    steps = []
    for mods in ("", "{use: pad_alignment}"):
        _, package = make(name, defaults, mods)
        patched = copy.deepcopy(model)
        with package.apply(patched) as patch:
            steps.append(step(patched, 37))
            patch.verify()
    for key, value in steps[0].items():
        assert (steps[1][key] - value).norm() <= 1e-2 * value.norm() + 1e-9, key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use", ["merge_siblings", "batch_small"])
def test_there_are_neither_siblings_nor_batches(make: Make, name: str, use: str) -> None:
    with pytest.raises(PolicyError, match=f"{use} can change nothing of what it matches"):
        make(name, "compute: keep", f"{{use: {use}}}")


@pytest.mark.parametrize(
    ("mods", "reason"),
    [
        ("", "it is part of a mixing layer, for which fuse_interaction has kernels"),
        ("{use: fuse_interaction}, ", "fuse_interaction takes it into a kernel as it is written"),
    ],
)
def test_products_of_mixing_layers_stay_for_fuse_interaction(make: Make, mods: str, reason: str) -> None:
    plan, _ = make("ranker", "compute: keep", f"{mods}{{use: pad_alignment, to: 128}}")
    assert all(mod.rewritten for mod in plan.mods)
    left = {each.name: each.reason for each in plan.mods[-1].unchanged}
    for name in ("rank", "compress"):
        assert left[f"layers.0.{name}"].startswith(reason)
