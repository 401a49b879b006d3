"""Shared by the tests of finding sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from loka.graph.sites.discover import SiteMap, find_sites
from loka.model.build_model import BuiltModel

Find = Callable[..., SiteMap]


@pytest.fixture(scope="session")
def find() -> Find:
    """`find(module, *args)`: the sites of a model on example inputs, whose first dimension is the batch."""

    def run(module: nn.Module, *args: Any) -> SiteMap:
        return find_sites(BuiltModel(module, args, {}, args[0].shape[0]))

    return run
