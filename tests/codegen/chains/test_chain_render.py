"""What a package with chains looks like, and that copies, checkpoints, compilers and state_dict take it."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.codegen import render_package, write_package
from loka.codegen.generation import check_package
from loka.codegen.modules.linear_recipes import site_recipe
from loka.errors import InputError
from loka.numerics.enums import Format, Range, Scaling
from loka.plan.plan import Plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

ROOT = Path(__file__).parents[3]
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
LONG = "a_layer_whose_author_liked_long_names_and_gave_it_one_of_half_a_line"


def long_names() -> nn.Module:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, LONG, nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.Linear(48, 48), nn.SiLU()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = getattr(self, LONG)(x)
            return out

    return Deep()


def mixed(name: str) -> dict[str, object]:
    return {"mlp.0": chains.CHAIN, "mlp.3": chains.AS_IS}.get(name, {})


@cache
def shapes() -> dict[str, Plan]:
    """The plans of these tests, by name; made when the first needs them, since importing the file is collecting it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _shapes()


def _shapes() -> dict[str, Plan]:
    tower = chains.Tower()
    linears = nn.Sequential(nn.Linear(48, 13, bias=False), nn.Linear(13, 48), nn.Linear(48, 32, bias=False))
    twelve = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(48, 48), nn.ReLU())])
    return {
        "tower": chains.chain_plan(tower),
        "twelve": chains.chain_plan(twelve),
        "rowwise": chains.chain_plan(tower, chains.ROWWISE_CHAIN),
        "fast": chains.chain_plan(tower, {**chains.CHAIN, "fast": True}),
        "plain": chains.chain_plan(tower, chains.AS_IS),
        "mixed": chains.chain_plan(tower, mixed),
        "linears": chains.chain_plan(linears),
        "no_input_grad": chains.chain_plan(linears, input_grad=False),
        "one": chains.linear_plan(),
        "one_without_bias": chains.linear_plan(bias=False),
        "wide": plans.make_plan(
            [plans.site_plan("a", k=40_000, **chains.CHAIN)], [plans.linear_binding(("a",), k=40_000)]  # type: ignore[arg-type]
        ),
        "widest": plans.make_plan(
            [plans.site_plan("a", k=2**21, **chains.CHAIN)], [plans.linear_binding(("a",), k=2**21)]  # type: ignore[arg-type]
        ),
        "long_names": chains.chain_plan(long_names()),
        "crosses": chains.chain_plan(sums.Crosses()),
        "crosses_apart": chains.chain_plan(sums.Apart()),
        "gated": chains.chain_plan(sums.Gated()),
        "gated_blocks": chains.chain_plan(sums.GatedBlocks()),
        "weighted": chains.chain_plan(sums.Weighted()),
    }  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    for name, plan in shapes().items():
        write_package(render_package(plan), folder / name)
    return folder


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    files = render_package(shapes()["tower"])
    return plans.import_package(files, tmp_path_factory.mktemp("tower"), "gen_tower")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["format", "--check", "--diff"], ["check"]])
def test_ruff_has_nothing_to_say(packages: Path, command: list[str]) -> None:
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    result = subprocess.run([RUFF, *command, *config, str(packages)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_all_import_and_hold_each_kernel_once(packages: Path, tmp_path: Path) -> None:
    for name in shapes():
        files = {path.name: path.read_text(encoding="utf-8") for path in (packages / name).iterdir() if path.is_file()}
        package = plans.import_package(files, tmp_path, f"gen_shape_{name}")
        assert package.BINDINGS
        functions = [node.name for node in ast.parse(files["kernels.py"]).body if isinstance(node, ast.FunctionDef)]
        assert len(functions) == len(set(functions))
        if name == "widest":
            assert "fused.py" not in files
            continue
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(files["kernels.py"]))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "fused"
        }
        defined = [node.name for node in ast.parse(files["fused.py"]).body if isinstance(node, ast.FunctionDef)]
        made = [name for name in defined if not name.startswith("_")]
        assert sorted(called) == sorted(set(made))
        assert len(made) == len(set(made))


def test_manifest_stamps_and_check_know_the_new_files(tmp_path: Path) -> None:
    files = render_package(shapes()["tower"])
    manifest = json.loads(files["manifest.json"])
    for name in ("fused.py", "triton_kernels.py", "kernels.py"):
        assert manifest["outputs"][name] == hashlib.sha256(files[name].encode()).hexdigest()
        assert f'STAMP = "{manifest["stamp"]}"' in files[name]
    assert "template triton/norm/forward.py.j2" in manifest["inputs"]
    write_package(files, tmp_path / "ranker")
    assert check_package(files, tmp_path / "ranker") == ()
    (tmp_path / "ranker" / "triton_kernels.py").unlink()
    (tmp_path / "ranker" / "fused.py").write_text("", encoding="utf-8")
    found = {difference.name: difference.kind.value for difference in check_package(files, tmp_path / "ranker")}
    assert found == {"triton_kernels.py": "missing", "fused.py": "edited"}
    plain = render_package(plans.linear_plan())
    assert not {"fused.py", "triton_kernels.py"} & set(plain)
    assert not any("triton" in name for name in json.loads(plain["manifest.json"])["inputs"])
    written = write_package(plain, tmp_path / "ranker", force=True)
    assert "fused.py" in written.removed


def test_operators_of_another_generation_do_not_import(tmp_path: Path) -> None:
    older, newer = (render_package(shapes()[name]) for name in ("tower", "linears"))
    with pytest.raises(InputError, match="run loka generate"):
        plans.import_package({**newer, "fused.py": older["fused.py"]}, tmp_path, "gen_chain_mixed_up")


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert render_package(shapes()["tower"]) == render_package(chains.chain_plan(chains.Tower()))


def test_reads_as_a_person_would_write_it() -> None:
    kernels = render_package(shapes()["one"])["kernels.py"]
    for text in (
        "class LinearFunction(torch.autograd.Function):",
        "        x_fp8 = Quantized(*fused.quantize_e4m3(x))",
        "        weight_fp8 = Quantized(*fused.quantize_e4m3(weight))",
        "        dispatch.save_for_backward(ctx, x_fp8, weight_fp8, bias)",
        "        x_fp8, weight_fp8, bias = dispatch.saved(ctx)",
        "        dy_fp8, bias_sums = Quantized.first(fused.add_backward_e4m3(grad))",
        "        dbias = fused.reduce_1(bias_sums, bias.dtype)",
        "def linear(x: Tensor, weight: Tensor, bias: Tensor, counter_id: int) -> Tensor:",
        "def linear_frozen(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, counter_id: int) -> Tensor:",
    ):
        assert text in kernels
    assert kernels.count("class ") == 1
    files = render_package(shapes()["tower"])
    assert files["modules.py"].count("kernels.body_mlp(") == 1
    assert "# from norm, mlp.0, mlp.1, mlp.2, mlp.3, mlp.4, mlp.5, mlp.6" in files["modules.py"]
    text = " ".join(files["kernels.py"].split())
    assert (
        "dgrad in e4m3 rowwise with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise."
        in text
    )


def test_cross_layers_are_one_function_that_reads_each_sum_once() -> None:
    """What lies between two layers is made by one kernel, forward and backward, and x's gradient by one in the end."""
    kernels = render_package(shapes()["crosses"])["kernels.py"]
    (body,) = [text for text in kernels.split("\nclass ") if text.startswith("BodyFunction")]
    forward, backward = body[: body.index("def backward")], body[body.index("def backward") :]
    sums = "sum_1 = Quantized.first(fused.add_times_residual_keep_e4m3(y_1, bias_1, x, x, sums_dtype))"
    assert forward.count(sums) == 1
    assert (
        "x_fp8_6 = Quantized(*fused.add_times_residual_e4m3(y_5, bias_5, x, sum_3))" in forward
    )  # nobody reads the last sum again
    assert backward.count("fused.products_and_3_added_added_added_added_48(") == 1
    assert backward.count("residual_in_out") == 1
    assert "(fused.add_times_backward_residual_in_e4m3(grad, dsum_3, x))" in backward  # whose sum no kernel writes
    apart = render_package(shapes()["crosses_apart"])["kernels.py"]
    assert "dother = fused.products_added_added_added_48(" in apart


def test_other_recipes_are_written_as_before() -> None:
    files = render_package(shapes()["mixed"])["kernels.py"]
    assert "def linear_e4m3_rowwise(" in files  # the last linear
    said = " ".join(chains.functions(files).values())
    assert "layer_norm -> linear -> layer_norm -> silu: x (..., 48), weight (80, 48) -> (..., 80). GEMMs count" in said
    assert "linear -> layer_norm -> silu: x (..., 80), weight (80, 80) -> (..., 80)." in said


def recipe_of(**changes: object) -> bool:
    found = {**chains.CHAIN, **changes}
    return site_recipe(plans.site_plan("a", **found)).operands.is_chain  # type: ignore[arg-type]


def test_which_recipes_are_chains() -> None:
    rows, transposed, once = chains.ROWS, chains.TRANSPOSED, chains.TRANSPOSED_TENSORWISE
    assert recipe_of()
    assert recipe_of(wgrad=(transposed, transposed))
    assert recipe_of(fast=True)
    assert recipe_of(input_grad=False)
    for changes in (
        {"fprop": (replace(rows, power_of_two=False), rows)},
        {"fprop": (rows, replace(rows, format=Format.E5M2))},
        {"fprop": (replace(rows, range=Range.STATIC, amax=2.0), rows)},
        {"fprop": (transposed, rows)},
        {"fprop": None},
        {"dgrad": (rows, rows)},
        {"dgrad": (replace(rows, scaling=Scaling.TENSORWISE), transposed)},
        {"dgrad": (rows, once)},
        {"wgrad": (transposed, once)},
        {"wgrad": (rows, transposed)},
        {"wgrad": None},
        {"wgrad": (replace(transposed, format=Format.E5M2), transposed)},
    ):
        assert not recipe_of(**changes), changes


def bound(package: ModuleType) -> chains.Holder:
    torch.manual_seed(0)
    model = chains.Holder(chains.Tower())
    package.apply(model)
    return model


def test_copies_pickles_and_state_dict(tower: ModuleType) -> None:
    from loka.dispatch import patch_of

    model, x = bound(tower), torch.randn(5, 48)
    plain = chains.Holder(chains.Tower())
    plain.load_state_dict(model.state_dict())
    tower.apply(plain)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), plain):  # noqa: S301 - our own bytes
        assert torch.equal(other(x), model(x))
        y = other(x)
        y.sum().backward()
        patch_of(other).verify()
        assert other.body.loka.counter_id(0) != model.body.loka.counter_id(0)
    assert set(model.state_dict()) == set(chains.Holder(chains.Tower()).state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(tower: ModuleType, reentrant: bool) -> None:
    model, dy = bound(tower), torch.randn(5, 48)
    x = torch.randn(5, 48)
    expected = chains.gradients(model, x, dy)
    x.requires_grad_()
    model.zero_grad()
    checkpoint(model, x, use_reentrant=reentrant).backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad, expected["x"])
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tower", "plain"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(name: str, dynamic: bool, tmp_path: Path) -> None:
    package = plans.import_package(render_package(shapes()[name]), tmp_path, f"gen_compiled_{name}_{dynamic}")
    torch.manual_seed(0)
    model = chains.Holder(chains.Tower())
    try:
        with package.apply(model) as patch:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            for batch in (6, 11) if dynamic else (6,):
                x, dy = torch.randn(batch, 48), torch.randn(batch, 48)
                expected = chains.gradients(model, x, dy)
                patch.reset()
                found = chains.gradients(compiled, x, dy)
                patch.verify()
                for key, value in expected.items():
                    torch.testing.assert_close(found.get(key, found.get(f"_orig_mod.{key}")), value)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert compiled.body(torch.randn(4, 48)).dtype == model.body(torch.randn(4, 48)).dtype
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_the_package_imports_neither_triton_nor_anything_new_on_a_cpu(packages: Path) -> None:
    script = (
        "import sys, importlib; sys.path.insert(0, sys.argv[1]); importlib.import_module('tower')\n"
        "print(sorted({'triton', 'pydantic', 'jinja2', 'tower.triton_kernels'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(packages)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = ast.literal_eval(result.stdout)
    assert set(loaded) <= {"triton"}  # torch itself may load it
    texts = "".join(path.read_text(encoding="utf-8") for path in (packages / "tower").glob("*.py"))
    imported = {line.split()[1] for line in texts.split("\n") if line.startswith(("import ", "from "))}
    known = {"__future__", "typing", "torch", "torch.autograd.function", "loka", "."}
    known |= {"loka.dispatch", "loka.kernels.fused", "loka.kernels.fused.norm"}
    assert imported == known | {"triton", "triton.language"}
