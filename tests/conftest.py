"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from loka.kernels.measurements import recording
from loka.kernels.measurements.lookup import Measurements
from tests.support.failure_names import pytest_configure  # noqa: F401 - a hook

# Inductor builds a library for each of the CPU's vector extensions, and loads it in a process that imports torch, to
# learn whether the compiler knows them: 20 s. Kernels are vectorised as before; a compiler without one of them fails.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

ABOVE = ("mods", "plan", "codegen", "bench", "benchmarks", "cli")

if find_spec("hypothesis") is not None:  # a machine that only runs kernels need not have it
    from hypothesis import settings

    # By default a test fails where making ten inputs took a second; the first text alone takes longer in a fresh
    # checkout, where all modules are read for constants. Without a deadline that limit is 30 seconds.
    settings.register_profile("loka", deadline=None)
    settings.register_profile("fuzz", deadline=None, max_examples=250)  # of `make fuzz`
    settings.load_profile("loka")


@pytest.fixture(autouse=True)
def no_shipped_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of tests are planned by the measurements that they name: what happens to ship decides none of them."""
    try:
        from loka.plan import planner
        from loka.plan.tuning import candidates
    except ImportError:
        return  # a machine that only runs kernels need not have what reads policies

    opened = planner.open_measurements
    for module in (planner, candidates):
        monkeypatch.setattr(module, "open_measurements", lambda policy: opened(policy) if policy.measurements else None)


@pytest.fixture(autouse=True, scope="session")
def shipped_measurements_read_once() -> Iterator[None]:
    """A set that ships has ten thousand lines, and nothing changes it in memory."""
    shipped, place = Measurements.shipped, recording.DATA
    known = cache(shipped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "shipped", lambda target: (known if place == recording.DATA else shipped)(target))
        yield


@pytest.fixture(autouse=True, scope="module")
def models_read_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """In rooms that use what was read of models, torch reads alike models once; see `tests.support.read_once`."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in ABOVE:
        yield
        return
    from tests.support.read_once import read_once  # it needs what reads policies

    with read_once():
        yield


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    """A test that leaves another number of torch's threads fails: with two, the tests after it take twice the time."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"the test changed torch's number of threads from {before} to {after}; restore it"


def pytest_collection_finish() -> None:
    """What was imported and collected by now stays: a collection of garbage need not look through it each time.

    What tests write from now on has no bytecode: a module written twice in a second, at one size, would be the first.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of the processes that they start
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """For what looks at what is left when Python ends."""
    gc.unfreeze()


@pytest.fixture
def triton_cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiles is kept in build/, by its text and by Triton's own, for the other tests and the next run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(pytestconfig.rootpath / "build" / "triton"))
