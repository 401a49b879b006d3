"""What a training machine needs: torch and the standard library, and a package that is whole."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka import dispatch
from tests.support import dispatch_sample as sample

FORBIDDEN = ("pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.codegen", "loka.plan", "loka.policy")


@pytest.mark.slow
def test_dispatch_imports_torch_and_the_standard_library_only():
    program = (
        "import sys; import torch; before = set(sys.modules); import loka.dispatch;"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)));"
        f"print(*(n for n in {FORBIDDEN!r} if n in set(sys.modules) - before))"
    )
    new, forbidden = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(new.split()) <= {"loka", "torch"}
    assert forbidden == ""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the sample package under a name of its own."""
    folder = tmp_path / "ranker_copy"
    shutil.copytree(Path(sample.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "ranker_copy"]:
        del sys.modules[name]


def test_a_whole_package_imports(package):
    assert importlib.import_module("ranker_copy").STAMP == sample.STAMP


@pytest.mark.parametrize("file", ["__init__.py", "kernels.py", "modules.py", "manifest.json"])
def test_a_mixed_package_does_not_import(package, file):
    text = (package / file).read_text()
    changed = text.replace('"0" * 64', '"1" * 64').replace("0" * 64, "1" * 64)
    assert changed != text
    (package / file).write_text(changed)
    with pytest.raises(dispatch.BindError, match=r"not of one generation.*run loka generate"):
        importlib.import_module("ranker_copy")


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"stamp": 3}'])
def test_a_package_without_a_good_manifest_does_not_import(package, manifest):
    (package / "manifest.json").unlink()
    if manifest is not None:
        (package / "manifest.json").write_text(manifest)
    with pytest.raises(dispatch.BindError, match="not of one generation"):
        importlib.import_module("ranker_copy")


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_output_dtype():
    x = torch.zeros(1)
    assert dispatch.output_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert dispatch.output_dtype(x) == torch.float16
        assert dispatch.output_dtype(x.double()) == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert dispatch.output_dtype(x) == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert dispatch.output_dtype(x) == torch.float32
