"""Training machines have torch and the standard library: what carries mods out there imports nothing more."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORBIDDEN = {"pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.policy", "loka.plan", "loka.zoo"}
PROGRAM = """
import sys, torch
before = set(sys.modules)
import loka.mods.adapt, loka.mods.norms, loka.mods.adaptation
from loka.mods.registry import ModKind, module_mod, names_of
mods = [module_mod(name) for name in names_of(ModKind.MODULES)]
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_what_runs_beside_a_model_imports_torch_and_the_standard_library_only() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    new = set(done.stdout.split())
    assert {name.split(".")[0] for name in new} - set(sys.stdlib_module_names) <= {"torch", "loka"}
    assert not new & FORBIDDEN
    own = {name for name in new if name.startswith("loka.")}
    allowed = {"loka.errors", "loka.version", "loka.mods", "loka.graph", "loka.graph.source", "loka.graph.wrappers"}
    assert {name for name in own if not name.startswith("loka.mods.")} <= allowed
    assert "loka.mods.modules.norm_first" in own
    assert not {"loka.mods.dataflow", "loka.mods.rewriting"} & own
