"""A built wheel, installed in an empty environment far from the checkout, generates and trains the same.

An editable install would hide what the wheel forgot: templates, shipped policies, a module.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loka import __version__

REPOSITORY = Path(__file__).parents[2]
PACKAGE_FILES = ("__init__.py", "kernels.py", "modules.py", "plan.json", "manifest.json")

# Room enough for an install on a slow connection; the test itself takes about a minute.
INSTALL_SECONDS = 1500


def _run(*command: str | Path, cwd: Path, timeout: int = 300) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} left with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with the build backend of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=REPOSITORY)
    (built,) = folder.glob("loka-*.whl")
    return built


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a new environment that holds the wheel, at the tested versions, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("empty") / "env"
    _run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    constraints = REPOSITORY / "constraints.txt"
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    _run(*pip, "install", "-c", constraints, wheel, cwd=folder.parent, timeout=INSTALL_SECONDS)
    return folder / "bin"


def test_wheel_holds_templates_policies_and_no_generated_code(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder, kept_as in (("templates", "loka/_share/templates"), ("policies", "loka/_share/policies")):
        root = REPOSITORY / folder
        expected = {f"{kept_as}/{file.relative_to(root).as_posix()}" for file in root.rglob("*") if file.is_file()}
        assert expected, folder
        assert expected <= set(names)
    beside_code = {file for file in (REPOSITORY / "loka").rglob("*") if file.is_file() and file.suffix[:3] != ".py"}
    data = {file.relative_to(REPOSITORY).as_posix() for file in beside_code}  # the measurements that ship among it
    assert "loka/py.typed" in data
    assert data <= set(names)
    assert not [name for name in names if name.startswith(("generated/", "tests/", "benchmarks/"))]


def test_wheel_has_the_version_that_the_package_says_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode().split("\n")
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert f"Version: {__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert licence == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.slow
def test_installed_far_away_it_generates_and_trains_the_same(binaries: Path, tmp_path: Path) -> None:
    python, loka = binaries / "python", binaries / "loka"
    share = _run(
        python, "-c", "import loka, pathlib; print(pathlib.Path(loka.__file__).parent / '_share')", cwd=tmp_path
    )
    assert not Path(share.strip()).is_relative_to(REPOSITORY)
    policy = tmp_path / "policies" / "ranker.yaml"
    shutil.copytree(Path(share.strip()) / "policies", policy.parent)

    _run(loka, "generate", "policies/ranker.yaml", cwd=tmp_path)
    for name in PACKAGE_FILES:
        generated = (tmp_path / "generated" / "ranker" / name).read_bytes()
        assert generated == (REPOSITORY / "generated" / "ranker" / name).read_bytes(), name

    train = ("train", "policies/ranker.yaml", "--steps", "3", "--json")
    far = json.loads(_run(loka, *train, cwd=tmp_path))
    here = json.loads(_run(Path(sys.executable).with_name("loka"), *train, cwd=REPOSITORY))
    assert far["share_fp8"] == here["share_fp8"] > 0.5
    for side in ("as_is", "fp8"):
        assert far[side]["ne"] == pytest.approx(here[side]["ne"], rel=1e-5)
