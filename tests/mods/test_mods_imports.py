"""Training machines have torch and the standard library: what carries mods out there imports nothing more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loka.mods.registry import MODS

FORBIDDEN = ("pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.policy", "loka.plan", "loka.zoo")
BESIDE_A_MODEL = (
    "import loka.mods.adapt, loka.mods.mod_modules, loka.mods.adaptation;"
    "from loka.mods.registry import ModKind, module_mod, names_of;"
    "mods = [module_mod(name) for name in names_of(ModKind.MODULES)]"
)


PROGRAM = """
import json, os, sys, tempfile
import torch

def imported(program):  # in a process that is as after torch alone, whatever the program before imported
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            before = set(sys.modules)
            exec(program, {})
            json.dump(sorted(set(sys.modules) - before), answer)
            answer.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"{program!r} failed")
        answer.seek(0)
        return json.load(answer)

print(json.dumps([imported(program) for program in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The modules that each program imports after torch, which one process does for all."""
    programs = [BESIDE_A_MODEL, *(f"import loka.mods.{name}.{name}" for name in MODS)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(programs), capture_output=True, text=True, check=True
    )
    return {program: set(new) for program, new in zip(programs, json.loads(done.stdout), strict=True)}


def checked(new: set[str]) -> set[str]:
    """The modules of loka among those imported, which are otherwise torch's and the standard library's."""
    others = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names) - {"loka"}
    assert others <= {"torch"}
    assert not new & set(FORBIDDEN)
    return {name for name in new if name.startswith("loka.")}


@pytest.mark.slow
def test_what_runs_beside_a_model_imports_torch_and_the_standard_library_only(imports):
    own = checked(imports[BESIDE_A_MODEL])
    allowed = {"loka.errors", "loka.version", "loka.mods", "loka.graph", "loka.graph.script", "loka.graph.source"}
    assert {name for name in own if not name.startswith("loka.mods.")} <= allowed
    assert "loka.mods.norm_first.norm_first" in own
    assert "loka.mods.dataflow" not in own
    assert not [name for name in own if name.endswith("_planning")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_what_carries_a_mod_out_imports_torch_and_the_standard_library_only(imports, name):
    own = checked(imports[f"import loka.mods.{name}.{name}"])
    assert f"loka.mods.{name}.{name}" in own
    assert not [other for other in own if other.endswith("_planning")]
    above = ("loka.plan", "loka.probe", "loka.codegen", "loka.dispatch", "loka.bench", "loka.cli")
    assert not [other for other in own if other.startswith(above)]
