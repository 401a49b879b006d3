"""Three packages are rendered to the bytes that lie in `golden`, under any hash seed, and clean by ruff.

Renew them with `.venv/bin/python -m tests.codegen.golden`, and read what changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.golden_plans import FOLDER, GOLDEN, package_files, rendered
from tests.support.processes.launch import environment

ROOT = Path(__file__).parents[2]
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_bytes_as_before(name: str) -> None:
    found = rendered(name)
    assert {path.name for path in (FOLDER / name).iterdir()} == found.keys()
    for file, text in found.items():
        assert text == (FOLDER / name / file).read_text(encoding="utf-8"), f"{name}/{file}: see the head of this file"


@pytest.mark.slow
def test_ruff_has_nothing_to_say_and_each_kernel_is_there_once(tmp_path: Path) -> None:
    for name in GOLDEN:
        package = plans.import_package(package_files(name), tmp_path, f"gen_golden_{name}")
        assert package.BINDINGS
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([RUFF, *command, *config], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


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
