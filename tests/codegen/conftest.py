"""Places for tests to make packages in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.codegen.codegen_plans import PlanPackage, plan_packages
from tests.support.codegen.modded_models import Workplace
from tests.support.codegen.policy_packages import Make, policy_packages


@pytest.fixture(scope="module")
def shared_workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """The workplace of a file's tests: what one has made the others get."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Workplace(folder)
        yield made
        made.forget()


@pytest.fixture
def workplace(shared_workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Makes packages of small models, in a folder that is then the current one."""
    monkeypatch.chdir(shared_workplace.folder)
    shared_workplace.models.SIZES.clear()
    return shared_workplace


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes packages of policies, in a folder that is then the current one, and forgets them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with policy_packages(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanPackage:
    """The package of a plan."""
    return plan_packages(tmp_path_factory.mktemp)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code of one test reaches another."""
    yield
    torch._dynamo.reset()
