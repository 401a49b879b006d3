"""What a generated package needs of mods imports torch and the standard library only."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.policy", "loka.plan", "loka.zoo")


def test_what_runs_beside_a_model_imports_torch_and_the_standard_library_only():
    program = (
        "import sys; import torch; before = set(sys.modules);"
        "import loka.mods.adapt, loka.mods.mod_modules, loka.mods.adaptation, loka.mods.registry;"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)));"
        f"print(*(n for n in {FORBIDDEN!r} if n in set(sys.modules) - before));"
        "print(*sorted(n for n in set(sys.modules) - before if n.startswith('loka.')))"
    )
    new, forbidden, own = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(new.split()) <= {"loka", "torch"}
    assert forbidden == ""
    allowed = {"loka.errors", "loka.mods", "loka.graph", "loka.graph.source"}
    assert {name for name in own.split() if not name.startswith("loka.mods.")} <= allowed
    assert "loka.mods.dataflow" not in own.split()
