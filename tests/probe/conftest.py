"""Policies of the models that these tests share."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import probe_models


@pytest.fixture
def policy(tmp_path):
    """Writes a policy of one of probe_models' builders; its path."""

    def write(name, batch_size=32):
        path = tmp_path / f"{name}.yaml"
        callables = f"factory: '{probe_models.__name__}:build_{name}', inputs: '{probe_models.__name__}:{name}_inputs'"
        path.write_text(f"version: 1\nname: {name}\nmodel: {{{callables}, batch_size: {batch_size}}}\n")
        return path

    return write


@pytest.fixture
def fresh_dynamo():
    """No compiled code of one test reaches another."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
