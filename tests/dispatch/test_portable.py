"""`loka.portable`: exported programs without LoKA's operators, on the CPU with the patched model's bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import loka
from generated import ranker as ranker_package
from loka.codegen import render_package
from loka.numerics.enums import Gemm
from loka.zoo import ranker, ranker_inputs
from tests.support import dispatch_sample as sample
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen import compiler_view as view
from tests.support.models import dispatch_models as models

WIDTH = 64
TABLE = ((16, "torch.scaled_mm"), (48, "fbgemm.rowwise"), (112, "mslk.rowwise"))
# A process that refuses LoKA runs both files on each batch, and says how far the results are from those beside them.
ALONE = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("loka", "generated"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refusing())
import torch
folder = sys.argv[1]
program = torch.export.load(f"{folder}/model.pt2").module()
package = torch._inductor.aoti_load_package(f"{folder}/aoti.pt2")
torch.set_grad_enabled(False)
for x, expected in torch.load(f"{folder}/batches.pt"):
    print(torch.equal(program(x), expected), float((package(x) - expected).abs().max()))
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, of its pytrees
    pytest.mark.usefixtures("without_gradients"),
]


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


def operators(program) -> set[str]:
    """The namespaces of the operators in a program."""
    found = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return {each.namespace for each in found if isinstance(each, torch._ops.OpOverload)}


def bound_tower(tmp_path: Path, name: str, recipe, change=lambda plan: plan) -> nn.Module:
    """A model with a chain, bound for inference."""
    torch.manual_seed(0)
    tower = chains.Tower(WIDTH, WIDTH)
    plan = change(chains.chain_plan(tower, recipe, lambda batch: torch.randn(batch, WIDTH)))
    model = chains.Holder(tower).eval()
    plans.import_package(render_package(plan), tmp_path, name).apply(model, mode="infer")
    return model


def test_what_is_left_is_torchs_and_has_the_same_bits():
    model, x = models.mlp().eval(), torch.randn(6, 32)
    sample.apply(model, mode="infer")
    exported = torch.export.export(model, (x,))
    assert operators(exported) == {"aten", "loka"}
    program = loka.portable(exported)
    assert operators(program) == {"aten"}
    assert torch.equal(program.module()(x), model(x))
    assert operators(exported) == {"aten", "loka"}


def test_a_batch_of_any_size():
    model, rows = models.mlp().eval(), Dim("rows", min=2, max=4096)
    patch = sample.apply(model, mode="infer")
    exported = torch.export.export(model, (torch.randn(6, 32),), dynamic_shapes=({0: rows},))
    program = loka.portable(exported).module()
    program(torch.randn(2, 32))
    with pytest.raises(loka.VerifyError, match="3 of 3 planned FP8 GEMMs did not run"):  # tracing is no run
        patch.verify(backward=False)
    for count in (2, 6, 41):
        x = torch.randn(count, 32)
        assert torch.equal(program(x), model(x))


@pytest.mark.slow
def test_fused_kernels_become_their_references():
    model, inputs = ranker().eval(), ranker_inputs(8)
    ranker_package.apply(model, mode="infer")
    batch = Dim("batch", min=2, max=65536)
    exported = torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    assert operators(exported) == {"aten", "loka", "loka_generated"}
    program = loka.portable(exported)
    assert operators(program) == {"aten"}
    for inputs in (ranker_inputs(8), ranker_inputs(33)):
        assert torch.equal(program.module()(*inputs), model(*inputs))


@pytest.mark.slow
def test_on_a_gpu_launches_and_torchs_gemms_are_left(monkeypatch: pytest.MonkeyPatch):
    model = ranker().eval().bfloat16()
    ranker_package.apply(model, mode="infer")
    inputs = tuple(each.bfloat16() if each.is_floating_point() else each for each in ranker_inputs(8))
    exported = torch.export.export(model, inputs)
    view.pretend_hopper(monkeypatch)
    program = loka.portable(exported)
    graphs = [program.graph_module]
    assert not [node for node in view.calls(graphs) if "loka" in str(node.target)]
    assert len(view.operators(graphs, "aten._scaled_mm")) == 9
    assert ("norm_forward", frozenset({"out_ptr", "scale_ptr", "scale_max_ptr"})) in view.launches(graphs)


def test_static_scales_are_refused(tmp_path: Path):
    model = bound_tower(tmp_path, "gen_portable_static", chains.known_chain())
    exported = torch.export.export(model, (torch.randn(8, WIDTH),))
    with pytest.raises(loka.BindError, match=r"portable: .*static_counted.* can only run with LoKA here: .*dynamic"):
        loka.portable(exported)


def test_kernels_by_rows_need_a_fixed_batch(tmp_path: Path):
    model = bound_tower(
        tmp_path,
        "gen_portable_rows",
        chains.ROWWISE_CHAIN,
        lambda plan: plans.planned_on(plan, {}, {Gemm.FPROP: TABLE}),
    )
    x = torch.randn(24, WIDTH)
    assert torch.equal(loka.portable(torch.export.export(model, (x,))).module()(x), model(x))
    rows = Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    with pytest.raises(loka.BindError, match=r"chooses kernels by the number of rows.*export the model with a fixed"):
        loka.portable(exported)


@pytest.mark.slow
def test_saved_and_compiled_it_runs_where_loka_is_not(tmp_path: Path):
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).eval()
    sample.apply(model, (sample.linears("0"),), mode="infer")
    rows = Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(8, 32),), dynamic_shapes=({0: rows},))
    program = loka.portable(exported)
    torch.export.save(program, tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "aoti.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    batches = [torch.randn(count, 32) for count in (8, 33)]
    torch.save([(x, model(x)) for x in batches], tmp_path / "batches.pt")
    ran = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [equal for equal, _ in lines] == ["True", "True"]
    assert max(float(far) for _, far in lines) < 0.05 * float(model(batches[0]).abs().max())  # ties may round otherwise
