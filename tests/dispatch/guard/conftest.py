"""The model that most tests of the guard train, and its patch."""

from __future__ import annotations

import pytest
from torch._dynamo.testing import CompileCounter

from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


@pytest.fixture
def model():
    """Two blocks and a head."""
    return models.Blocks()


@pytest.fixture
def patch(model):
    return sample.apply(model, sample.BLOCKS)


@pytest.fixture
def compilations():
    """A backend that counts the graphs it is asked for, and runs them as they are."""
    return CompileCounter()
