"""A built wheel, installed far from the checkout beside the packages that it asks for, generates the same, and trains.

An editable install would hide what the wheel forgot: templates, shipped policies, a module, a requirement.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from loka import __version__

REPOSITORY = Path(__file__).parents[2]
PACKAGE_FILES = ("__init__.py", "kernels.py", "modules.py", "plan.json", "manifest.json")

SMALL = """\
version: 1
extends: policies/small_ranker.yaml
name: small
model: {batch_size: 256}
train: {test: "few_rows:test_batches"}
"""

FEW_ROWS = """\
from loka.zoo.clicks import ClickStream


def test_batches(batch_size, seed):
    return ClickStream("test", 2048, batch_size, seed)
"""

GENERATE_AND_TRAIN = """\
from loka.cli.main import app

app(["generate", "small.yaml"], standalone_mode=False)
print()
app(["train", "small.yaml", "--steps", "3", "--json"], standalone_mode=False)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
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


def _required(requirements: list[str], found: dict[str, Distribution]) -> None:
    """Add to `found` what these requirements ask for, and what that asks for, at the versions of this environment."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = distribution(requirement.name)
        assert requirement.specifier.contains(installed.version, prereleases=True), (
            f"{requirement}: {installed.version}"
        )
        if installed.name not in found:
            found[installed.name] = installed
            _required(installed.requires or [], found)


def _link(installed: Distribution, packages: Path) -> None:
    """Links to a distribution's folders and modules."""
    names = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
    for name in names:
        if not (packages / name).exists():
            (packages / name).symlink_to(installed.locate_file(name))


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a new environment that holds the wheel, links to what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("empty") / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet")
    _run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder.parent)
    asks = "import importlib.metadata as m, json; print(json.dumps(m.requires('loka')))"
    found: dict[str, Distribution] = {}
    _required(json.loads(_run(python, "-c", asks, cwd=folder.parent)), found)
    assert "torch" in found
    assert "loka" not in found
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_run(python, "-c", place, cwd=folder.parent).strip())
    for installed in found.values():
        _link(installed, packages)
    return python.parent


@pytest.mark.slow
def test_wheel_holds_templates_policies_the_licence_and_no_generated_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode().split("\n")
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert {f"Version: {__version__}", "License-Expression: Apache-2.0"} <= set(metadata)
    assert licence == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    for kept, kept_as in (("templates", "loka/_share/templates"), ("policies", "loka/_share/policies")):
        root = REPOSITORY / kept
        expected = {f"{kept_as}/{file.relative_to(root).as_posix()}" for file in root.rglob("*") if file.is_file()}
        assert expected, kept
        assert expected <= set(names)
    beside_code = {file for file in (REPOSITORY / "loka").rglob("*") if file.is_file() and file.suffix[:3] != ".py"}
    data = {file.relative_to(REPOSITORY).as_posix() for file in beside_code}  # the measurements that ship among it
    assert "loka/py.typed" in data
    assert data <= set(names)
    assert not [name for name in names if name.startswith(("generated/", "tests/", "benchmarks/"))]


@pytest.mark.slow
def test_installed_far_away_it_generates_the_same_and_trains(binaries: Path, tmp_path: Path) -> None:
    python, loka = binaries / "python", binaries / "loka"
    share = _run(
        python, "-c", "import loka, pathlib; print(pathlib.Path(loka.__file__).parent / '_share')", cwd=tmp_path
    )
    assert not Path(share.strip()).is_relative_to(REPOSITORY)
    shutil.copytree(Path(share.strip()) / "policies", tmp_path / "policies")
    _run(loka, "generate", "policies/ranker.yaml", cwd=tmp_path)
    for name in PACKAGE_FILES:
        generated = (tmp_path / "generated" / "ranker" / name).read_bytes()
        assert generated == (REPOSITORY / "generated" / "ranker" / name).read_bytes(), name

    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    (tmp_path / "few_rows.py").write_text(FEW_ROWS, encoding="utf-8")
    printed = _run(python, "-c", GENERATE_AND_TRAIN, cwd=tmp_path)
    trained = json.loads(printed[printed.index("\n{") :])
    assert trained["share_fp8"] > 0.5
    assert abs(trained["ne_difference_percent"]) < 5
