"""Makes the models of these tests importable, here, in policies and in the processes that tests start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def policy(tmp_path):
    """Writes a policy of one of probe_models' builders; its path."""

    def write(name, batch_size=32):
        path = tmp_path / f"{name}.yaml"
        model = (
            f"{{factory: 'probe_models:build_{name}', inputs: 'probe_models:{name}_inputs', batch_size: {batch_size}}}"
        )
        path.write_text(f"version: 1\nname: {name}\nmodel: {model}\n")
        return path

    return write


@pytest.fixture
def fresh_dynamo():
    """No compiled code of one test reaches another."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
