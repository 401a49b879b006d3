"""The state of the compiler between tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No compiled code of one test reaches another."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
