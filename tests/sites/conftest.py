"""Shared by the tests of finding sites."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from loka.sites.build_model import BuiltModel
from loka.sites.discover import SiteMap, find_sites

Find = Callable[..., SiteMap]


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """The trap models beside this file."""
    name = "loka_tests_sites_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("models.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def find() -> Find:
    """`find(module, *args)`: the sites of a model on example inputs, whose first dimension is the batch."""

    def run(module: nn.Module, *args: Any) -> SiteMap:
        return find_sites(BuiltModel(module, args, {}, args[0].shape[0]))

    return run
