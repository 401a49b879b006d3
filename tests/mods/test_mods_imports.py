"""Training machines have torch and the standard library: what carries mods out there imports nothing more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loka.mods.registry import MODS

FORBIDDEN = ("pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.policy", "loka.plan", "loka.zoo")
BESIDE_A_MODEL = (
    "import loka.mods.adapt, loka.mods.mod_modules, loka.mods.adaptation;"
    "from loka.mods.registry import ModKind, module_mod, names_of;"
    "mods = [module_mod(name) for name in names_of(ModKind.MODULES)];"
)


def imported(program: str) -> tuple[set[str], set[str]]:
    """The packages, loka and the standard library apart, and the modules of loka that a program imports after torch."""
    program = (
        f"import sys; import torch; before = set(sys.modules); {program}"
        "new = set(sys.modules) - before;"
        "print(*sorted({name.split('.')[0] for name in new} - set(sys.stdlib_module_names) - {'loka'}));"
        f"print(*(name for name in {FORBIDDEN!r} if name in new));"
        "print(*sorted(name for name in new if name.startswith('loka.')))"
    )
    others, forbidden, own = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert forbidden == ""
    return set(others.split()), set(own.split())


@pytest.mark.slow
def test_what_runs_beside_a_model_imports_torch_and_the_standard_library_only():
    others, own = imported(BESIDE_A_MODEL)
    assert others <= {"torch"}
    allowed = {"loka.errors", "loka.version", "loka.mods", "loka.graph", "loka.graph.source"}
    assert {name for name in own if not name.startswith("loka.mods.")} <= allowed
    assert "loka.mods.norm_first.norm_first" in own
    assert "loka.mods.dataflow" not in own
    assert not [name for name in own if name.endswith("_planning")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_what_carries_a_mod_out_imports_torch_and_the_standard_library_only(name):
    others, own = imported(f"import loka.mods.{name}.{name};")
    assert others <= {"torch"}
    assert f"loka.mods.{name}.{name}" in own
    assert not [other for other in own if other.endswith("_planning")]
    above = ("loka.plan", "loka.probe", "loka.codegen", "loka.dispatch", "loka.bench", "loka.cli")
    assert not [other for other in own if other.startswith(above)]
