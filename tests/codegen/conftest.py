"""Puts what these tests share on the path, and gives those of mods a place to make packages in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from modded_models import Workplace


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Makes packages of small models, in a folder that is then the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = Workplace(tmp_path)
    yield made
    made.forget()
