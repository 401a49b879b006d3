"""What a package with chains holds, and that copies, checkpoints, compilers and state_dict take it."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from loka.codegen import render_package, write_package
from loka.codegen.generation import check_package
from loka.codegen.modules.linear_recipes import site_recipe
from loka.errors import InputError
from loka.numerics.enums import Format, Range, Scaling
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shapes() -> chains.Plans:
    """The plans of these tests, by name; made when the first needs them, since importing the file is collecting it."""
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(48, 13, bias=False), nn.Linear(13, 48), nn.Linear(48, 32, bias=False))
    bodies = {
        "tower": chains.Tower(),
        "plain": chains.Tower(),
        "linears": linears,
        "crosses": sums.Crosses(),
        "crosses_apart": sums.Apart(),
    }
    return chains.Plans(
        lambda name: chains.chain_plan(bodies[name], chains.AS_IS if name == "plain" else chains.CHAIN), bodies
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


@pytest.fixture(scope="module")
def tower(folder: Path, shapes: chains.Plans) -> ModuleType:
    return plans.import_package(render_package(shapes["tower"]), folder, "gen_tower")


def test_manifest_stamps_and_check_know_the_new_files(shapes: chains.Plans, tmp_path: Path) -> None:
    files = render_package(shapes["tower"])
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


def test_operators_of_another_generation_do_not_import(shapes: chains.Plans, tmp_path: Path) -> None:
    older, newer = (render_package(shapes[name]) for name in ("tower", "linears"))
    with pytest.raises(InputError, match="run loka generate"):
        plans.import_package({**newer, "fused.py": older["fused.py"]}, tmp_path, "gen_chain_mixed_up")


def test_cross_layers_are_one_function_that_reads_each_sum_once(shapes: chains.Plans) -> None:
    """What lies between two layers is made by one kernel, forward and backward, and x's gradient by one in the end."""
    kernels = render_package(shapes["crosses"])["kernels.py"]
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
    apart = render_package(shapes["crosses_apart"])["kernels.py"]
    assert "dother = fused.products_added_added_added_48(" in apart


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tower", "plain"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(name: str, dynamic: bool, shapes: chains.Plans, tmp_path: Path) -> None:
    package = plans.import_package(render_package(shapes[name]), tmp_path, f"gen_compiled_{name}_{dynamic}")
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
def test_the_package_imports_neither_triton_nor_anything_new_on_a_cpu(tower: ModuleType, folder: Path) -> None:
    script = (
        "import sys, importlib; sys.path.insert(0, sys.argv[1]); importlib.import_module('gen_tower')\n"
        "print(sorted({'triton', 'pydantic', 'jinja2', 'gen_tower.triton_kernels'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = ast.literal_eval(result.stdout)
    assert set(loaded) <= {"triton"}  # torch itself may load it
    texts = "".join(path.read_text(encoding="utf-8") for path in (folder / "gen_tower").glob("*.py"))
    imported = {line.split()[1] for line in texts.split("\n") if line.startswith(("import ", "from "))}
    known = {"__future__", "typing", "torch", "torch.autograd.function", "loka", "."}
    known |= {"loka.dispatch", "loka.kernels.fused", "loka.kernels.fused.norm"}
    assert imported == known | {"triton", "triton.language"}
