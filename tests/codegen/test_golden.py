"""Three packages are rendered to the bytes that lie in `golden`, under any hash seed, and clean by ruff.

Renew them with `.venv/bin/python -m tests.support.codegen.renew_golden`, and read what changed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from torch import nn

from loka.codegen import render_package
from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.golden_plans import FOLDER, GOLDEN, package_files, rendered
from tests.support.models import sum_models as sums
from tests.support.processes.launch import environment

ROOT = Path(__file__).parents[2]
OF_ANY_NUMBER = re.compile(r"(reduce|transpose|requantize_transpose|quantize_weights)$")  # the runtime calls them
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_bytes_as_before(name: str) -> None:
    found = rendered(name)
    assert {path.name for path in (FOLDER / name).iterdir()} == found.keys()
    for file, text in found.items():
        assert text == (FOLDER / name / file).read_text(encoding="utf-8"), f"{name}/{file}: see the head of this file"


@pytest.mark.slow
def test_packages_import_and_ruff_has_nothing_to_say(tmp_path: Path) -> None:
    packages = {name: package_files(name) for name in GOLDEN}
    packages |= {name: render_package(plan) for name, plan in wide_texts().items()}
    for name, files in packages.items():
        assert plans.import_package(files, tmp_path, f"gen_golden_{name}").BINDINGS
        assert {name for name in called_kernels(files) ^ made_kernels(files) if not OF_ANY_NUMBER.match(name)} == set()
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([RUFF, *command, *config], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def wide_texts() -> dict[str, Plan]:
    """Plans whose statements fill more than a line: many stages, sums, long names, kernels by rows of the batch."""
    layer = "a_layer_whose_author_liked_long_names_and_gave_it_one_of_half_a_line"
    twelve = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(48, 48), nn.ReLU())])
    long = nn.Sequential(OrderedDict({layer: nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.SiLU())}))
    table = dict.fromkeys(Gemm, ((16, "torch.scaled_mm"), (48, "fbgemm.rowwise"), (112, "mslk.rowwise")))
    return {
        "twelve": chains.chain_plan(twelve),
        "long": chains.chain_plan(long),
        "crosses": chains.chain_plan(sums.Crosses(), chains.known_chain()),
        "apart": chains.chain_plan(sums.Apart()),
        "blocks": chains.chain_plan(sums.GatedBlocks(), chains.known_chain(power_of_two=False)),
        "tables": plans.planned_on(chains.chain_plan(chains.Tower(), chains.ROWWISE_CHAIN), {}, table),
    }


def called_kernels(files: dict[str, str]) -> set[str]:
    """The kernels that functions and stages of chains name, without those of any number of operands."""
    text = files["kernels.py"]
    names = {name for pair in re.findall(r'\bfused,\s+"(\w+)",\s+"(\w+)"', text) for name in pair}
    patterns = (r'Launch\(\s*"(\w+)"', r'\("\w+", "(products_\w+)"\)')
    return names | {name for pattern in patterns for name in re.findall(pattern, text)}


def made_kernels(files: dict[str, str]) -> set[str]:
    return set(re.findall(r"^(\w+) = kernel\(", files.get("fused.py", ""), re.MULTILINE))


@pytest.mark.slow
def test_the_same_bytes_under_any_hash_seed() -> None:
    """What a set holds decides no order."""
    script = (
        "import hashlib\nfrom tests.support.codegen.golden_plans import package_files\n"
        "for file, text in package_files('chains').items():\n"
        "    print(file, hashlib.sha256(text.encode()).hexdigest())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    found = [
        subprocess.run(command, env=environment(PYTHONHASHSEED=seed), capture_output=True, text=True, check=True).stdout
        for seed in ("1", "4242")
    ]
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == len(package_files("chains"))
