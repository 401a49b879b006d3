"""A place for tests of mods to make packages in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.codegen.modded_models import Workplace


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Makes packages of small models, in a folder that is then the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = Workplace(tmp_path)
    yield made
    made.forget()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code of one test reaches another."""
    yield
    torch._dynamo.reset()
