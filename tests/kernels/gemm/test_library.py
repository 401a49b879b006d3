"""Libraries that may be missing: what is said of each way in which they can be."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from loka.errors import InputError
from loka.kernels.gemm.library import Library, has_fp8, loaded_operator, release

GEARS = Library(
    name="Gears",
    distributions=("gears-nightly", "gears"),
    oldest=(1, 6),
    install="pip install gears",
    module="gears.rowwise",
    operator="gears::turn",
    capability=(9, 0),
)
SOURCE = """
import torch
library = torch.library.Library("{0}", "DEF")
library.define("turn(Tensor x) -> Tensor")
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Install a distribution of some version, whose module has some text, and show a Hopper GPU."""

    def make(version: str, source: str, package: str = "gears") -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "rowwise.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

        def found(name: str) -> str:
            if name != "gears":
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: [(8, 0), (9, 0)][index])

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("gears")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "has"), [("AMD Instinct MI350X", True), ("AMD Instinct MI300X", False), ("AMD Instinct MI250X", False)]
)
def test_of_amds_gpus_those_with_ocps_fp8_have_it(name: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On others the reference runs, slow and right: an e4m3 that is read as e4m3fnuz has half its value."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    has_fp8.cache_clear()
    assert has_fp8(0) is has
    has_fp8.cache_clear()


def test_what_is_not_installed_says_how_to_install_it() -> None:
    assert GEARS.version() is None
    assert GEARS.unavailable_reason() == "Gears is not installed: pip install gears"
    with pytest.raises(InputError, match="gears::turn: Gears is not installed: pip install gears"):
        loaded_operator(GEARS)


def test_what_is_too_old_is_named_without_being_imported(install) -> None:
    install("1.5.2", "raise AssertionError('imported')")
    assert GEARS.unavailable_reason() == "Gears 1.5.2 is too old, 1.6 is the first that fits: pip install gears"


def test_without_a_device_nothing_is_imported(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("1.6.0", "raise AssertionError('imported')")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (8, 0))
    assert GEARS.unavailable_reason() == "the device's compute capability is 8.0; it needs 9.0"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert GEARS.unavailable_reason() == "no CUDA device is visible; it needs one of compute capability 9.0"


def test_what_does_not_load_says_why_and_beside_what(install) -> None:
    install("1.6.0+cu130", "raise OSError('undefined symbol: turn')")
    reason = GEARS.unavailable_reason()
    assert reason is not None
    assert reason.startswith(f"Gears 1.6.0+cu130 does not load beside torch {torch.__version__} (undefined symbol")
    with pytest.raises(InputError, match="undefined symbol"):
        loaded_operator(GEARS)


def test_a_release_without_the_operator_is_refused(install) -> None:
    install("2026.3.4", "", "gears")
    other = replace(GEARS, operator="gears_of_old::turn")
    assert other.unavailable_reason() == "Gears 2026.3.4 has no operator gears_of_old::turn: pip install gears"


def test_what_is_there_is_loaded(install) -> None:
    install("1.10", SOURCE.format("gears_of_now"), "gears_now")
    found = replace(GEARS, module="gears_now.rowwise", operator="gears_of_now::turn")
    assert found.unavailable_reason() is None
    assert loaded_operator(found).name() == "gears_of_now::turn"


@pytest.mark.parametrize(
    ("version", "numbers"), [("1.6.0+cu130", (1, 6, 0)), ("2026.3.4", (2026, 3, 4)), ("2.0rc1", (2, 0)), ("x", (0,))]
)
def test_releases(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers
