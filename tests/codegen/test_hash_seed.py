"""A plan is rendered to the same bytes under any hash seed: what a set holds decides no order."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes.launch import environment

RENDERED = """
import hashlib, torch
from loka.codegen import render_package
from tests.support.codegen import chain_plans as c, codegen_plans as p
torch.manual_seed(0)
for plan in (p.mixed_plan(), p.forward_plan(), c.chain_plan(c.Tower())):
    for name, text in sorted(render_package(plan).items()):
        print(name, hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_same_bytes_under_any_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", RENDERED],
            env=environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 17
