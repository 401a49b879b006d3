"""The kernel of docs/kernels.md, taken from that page: planned, generated, applied, run and verified."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import loka
from loka import dispatch
from loka.codegen import render_package
from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import catalogue
from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.plan.serialize import from_json, to_json
from tests.support.codegen import codegen_plans as plans

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"
MODEL = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 8))
    model.example_inputs = lambda batch: (torch.randn(batch, 48),)
    return model
"""
HEAD = 'version: 1\nname: pinned\nmodel: {factory: "pinned_model:build", batch_size: 64}\n'

Make = Callable[[str], Plan]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's file, as a module."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("```python\n")
    path = tmp_path_factory.mktemp("sample") / "sample_kernel.py"
    path.write_text(rest.partition("```")[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sample_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sample_kernel"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registered(sample: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's line in KERNELS."""
    monkeypatch.setattr(catalogue, "GEMM_KERNELS", (*catalogue.GEMM_KERNELS, sample.KERNEL))
    return sample


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The plan of a policy for MODEL."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pinned_model.py").write_text(MODEL)

    def one(text: str) -> Plan:
        (tmp_path / "policy.yaml").write_text(HEAD + text)
        return make_plan("policy.yaml")

    yield one
    sys.modules.pop("pinned_model", None)


def kernels(plan: Plan, name: str) -> list[str]:
    (site,) = (site for site in plan.sites if site.site.name == name)
    return [gemm.kernel for gemm in site.gemms]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU
def test_a_new_kernel_is_planned_generated_applied_and_verified(
    registered: ModuleType, make: Make, tmp_path: Path
) -> None:
    plan = make("defaults: {compute: fp8, kernel: sample.dequantized, wgrad: {kernel: torch.scaled_mm}}\n")
    assert kernels(plan, "0") == [registered.NAME, "torch.scaled_mm"]
    assert kernels(plan, "2") == [registered.NAME, registered.NAME, "torch.scaled_mm"]
    assert from_json(to_json(plan)) == plan
    files = render_package(plan)
    assert "torch.ops.loka.sample_dequantized_mm.default(" in files["kernels.py"]
    package = plans.import_package(files, tmp_path, "gen_pinned")
    model = sys.modules["pinned_model"].build()
    patch = package.apply(model)
    with pytest.raises(dispatch.VerifyError):
        patch.verify()
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(20, 48)).sum().backward()
    patch.verify()
    first = model[2].loka.counter_id(0)
    assert [set(call_counters.counts(first + offset)) for offset in range(3)] == [
        {registered.NAME}, {registered.NAME}, {"torch.scaled_mm"},
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
def test_the_probe_learns_of_sites_on_it(registered: ModuleType, make: Make, tmp_path: Path) -> None:
    files = render_package(make("defaults: {compute: fp8, kernel: sample.dequantized}\n"))
    model = sys.modules["pinned_model"].build()
    plans.import_package(files, tmp_path, "gen_probed").apply(model)
    with loka.Probe(model, "policy.yaml", every=1, rows=1_000_000) as probe:
        model(torch.randn(20, 48)).square().sum().backward()
        probe.step()
        found = {site.name: site for site in probe.stats()}
    for name in ("0", "2"):
        assert (found[name].input.rows, found[name].grad_output.rows) == (20, 20)


def test_what_it_refuses_stays_with_its_reason(registered: ModuleType, make: Make) -> None:
    plan = make("defaults: {compute: fp8, kernel: sample.dequantized}\n")
    (site,) = (site for site in plan.sites if site.site.name == "4")
    for gemm in site.gemms:
        assert not gemm.fp8
        assert gemm.reason == "it is made for M, K and N of at least 16, and one is 8"
        assert [each.kernel for each in gemm.rejected] == [registered.NAME]


def test_a_rule_for_one_site_that_it_refuses_is_an_error(registered: ModuleType, make: Make) -> None:
    with pytest.raises(InputError) as error:
        make('defaults: {compute: fp8}\nrules: [{match: "4", fprop: {kernel: sample.dequantized}}]\n')
    assert str(error.value) == (
        "policy.yaml:5: rule 1: 4 wants fprop of '4' on sample.dequantized, which cannot be: it is made for M, K and N "
        "of at least 16, and one is 8; write another kernel there, or leave it out [LK022]"
    )


def test_without_its_line_there_is_no_such_kernel(make: Make) -> None:
    with pytest.raises(InputError) as error:
        make("defaults: {compute: fp8, kernel: fbgemm.rowise}\n")
    assert str(error.value) == (
        "policy.yaml:4: there is no kernel 'fbgemm.rowise'; did you mean 'fbgemm.rowwise'? [LK022]"
    )


@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
def test_a_package_that_needs_it_says_so_where_it_is_not(
    registered: ModuleType, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = render_package(make("defaults: {compute: fp8, kernel: sample.dequantized}\n"))
    package = plans.import_package(files, tmp_path, "gen_unknown")
    monkeypatch.setattr(catalogue, "GEMM_KERNELS", catalogue.GEMM_KERNELS[:-1])
    with pytest.raises(dispatch.BindError, match=r"there is no kernel 'sample\.dequantized'; .*upgrade LoKA"):
        package.apply(sys.modules["pinned_model"].build())


def test_fbgemm_takes_the_transposed_operands_of_a_chain_rowwise(make: Make, tmp_path: Path) -> None:
    transposed = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"
    plan = make(f"defaults: {{{transposed}, kernel: fbgemm.rowwise}}\n")
    site = next(site for site in plan.sites if site.site.name == "2")
    wgrad = next(gemm for gemm in site.gemms if gemm.gemm is Gemm.WGRAD)
    assert wgrad.kernel == "fbgemm.rowwise"
    assert wgrad.operands is not None
    assert [(each.transposed, each.scaling.value) for each in wgrad.operands] == [(True, "rowwise")] * 2
    assert "fbgemm_rowwise_mm" in render_package(plan)["kernels.py"]
    usual = make(f"defaults: {{{transposed}}}\n")
    site = next(site for site in usual.sites if site.site.name == "2")
    assert [each.scaling.value for each in site.gemms[-1].operands or ()] == ["tensorwise"] * 2
