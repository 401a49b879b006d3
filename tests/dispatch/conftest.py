"""Makes the hand-written sample package and its models importable, here and in the processes that tests start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No compiled code of one test reaches another."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
