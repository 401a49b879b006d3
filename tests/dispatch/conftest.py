"""A model to bind, and the state of the compiler between tests."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.models import dispatch_models


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No compiled code of one test reaches another."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    """A small MLP, the one that `dispatch_sample` binds."""
    return dispatch_models.mlp()


@pytest.fixture
def compilations():
    """A backend that counts the graphs it is asked to compile."""
    return CompileCounterWithBackend("aot_eager")
