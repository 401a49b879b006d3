"""What a package with chains holds: its functions, its files, its imports."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loka.codegen import render_package, write_package
from loka.codegen.generation import check_package
from loka.errors import InputError
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.chain_bodies import plan_of

ROOT = Path(__file__).parents[3]


def test_manifest_stamps_and_check_know_the_new_files(tmp_path: Path) -> None:
    files = render_package(plan_of("fp8", "layer_norm_silu"))
    manifest = json.loads(files["manifest.json"])
    for name in ("fused.py", "triton_kernels.py", "kernels.py"):
        assert manifest["outputs"][name] == hashlib.sha256(files[name].encode()).hexdigest()
        assert f'STAMP = "{manifest["stamp"]}"' in files[name]
    assert "template triton/kernels/norm_forward.py.j2" in manifest["inputs"]
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
    older, newer = (render_package(plan_of("fp8", name)) for name in ("layer_norm_silu", "linears"))
    with pytest.raises(InputError, match="run loka generate"):
        plans.import_package({**newer, "fused.py": older["fused.py"]}, tmp_path, "gen_chain_mixed_up")


def kernels(recipe: str, body: str) -> str:
    return render_package(plan_of(recipe, body))["kernels.py"]


def stage(text: str, name: str) -> str:
    """The text of one stage or chain, on one line."""
    (found,) = re.findall(rf"^{name} = (.*?)\n(?=\S)", text + "\n", re.MULTILINE | re.DOTALL)
    return " ".join(found.replace(",\n", ", ").split())


def test_the_input_is_not_transposed_and_the_kept_sum_is_read_again() -> None:
    text = kernels("kept", "crosses")
    crossed, chain = stage(text, "FP8_LINEAR_TIMES_RESIDUAL_TO_FP8"), stage(text, "BODY")
    assert '"y bias times residual dtype", "x_fp8 x_scale x_scale_max sum"' in crossed  # for a residual, and for wgrad
    assert '"add_times_residual_keep_e4m3"' in crossed
    kept = stage(text, "FP8_GEMMS_NATIVE_WGRAD")
    assert 'saved="x_plain weight_fp8' in kept
    assert "wgrad=" not in kept
    assert "gemms=FP8_GEMMS_NATIVE_WGRAD, " in stage(text, "FP8_LINEAR_TO_FP8")
    assert chain.count("FP8_LINEAR_TO_FP8,") == 3


def test_a_site_whose_operands_are_in_fp8_alone_is_no_part_of_the_chain() -> None:
    """`down` of Pair is followed by a ReLU: its output gradient is made in FP8 only, so it ends the chain before it."""
    said = chains.functions(kernels("kept", "pair"))
    assert said["body_first"].startswith("linear: x (..., 48), weight (24, 48) ->")
    assert said["body_second"].startswith("linear: x (..., 40), weight (48, 40) ->")
    assert not any(each.count("linear") == 4 for each in chains.functions(kernels("kept", "residuals")).values())
    assert chains.functions(kernels("kept", "crosses"))["body"].count("linear") == 7


def test_cross_layers_are_one_function_that_reads_each_sum_once() -> None:
    """What lies between two layers is made by one kernel, forward and backward, and x's gradient by one in the end."""
    text = kernels("fp8", "crosses")
    chain = stage(text, "BODY")
    assert '"add_times_residual_keep_e4m3", "y bias times residual dtype", "x_fp8 x_scale x_scale_max sum"' in text
    assert '"add_times_residual_e4m3", "y bias times residual", "x_fp8' in text  # nobody reads the last sum again
    assert 'products=(("x", "products_and_3_added_added_added_added_48"),)' in chain
    assert len(re.findall(r'"\w*residual_in_out\w*"', text)) == 1
    assert '"add_times_backward_residual_in_e4m3", "grad residual_grad times"' in text  # whose sum no kernel writes
    apart = kernels("fp8", "crosses_apart")
    assert '("other", "products_added_added_added_48")' in stage(apart, "BODY_CROSS")


@pytest.mark.slow
def test_the_package_imports_neither_triton_nor_anything_new_on_a_cpu(tmp_path: Path) -> None:
    assert plans.import_package(render_package(plan_of("fp8", "layer_norm_silu")), tmp_path, "gen_tower").BINDINGS
    script = (
        "import sys, importlib; sys.path.insert(0, sys.argv[1]); importlib.import_module('gen_tower')\n"
        "print(sorted({'triton', 'pydantic', 'jinja2', 'gen_tower.triton_kernels'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = ast.literal_eval(result.stdout)
    assert set(loaded) <= {"triton"}  # torch itself may load it
    texts = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "gen_tower").glob("*.py"))
    imported = {line.split()[1] for line in texts.split("\n") if line.startswith(("import ", "from "))}
    known = {"__future__", "torch", "loka", ".", "loka.dispatch.chain", "loka.kernels.chain_values"}
    known |= {"loka.devices.spec", "triton", "triton.language"}
    assert imported >= known
    assert {name for name in imported - known if not name.startswith("loka.kernels.fused")} == set()
