"""The machine as a key: what it is made of, where it comes from, and what differs."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from loka.errors import InputError
from loka.kernels.measurements import versions
from loka.kernels.measurements.lookup import Measurements, Versions
from tests.support.plan.measured_cases import HOPPER, gemm, measurement


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_nothing_to_measure_on():
    with pytest.raises(InputError, match="no CUDA device is visible"):
        Versions.here()


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_here_is_what_the_process_runs_with(fake_gpu):
    here = Versions.here("1.6.0")
    assert (here.device, here.capability, here.library) == ("NVIDIA H100 80GB HBM3", "9.0", "1.6.0")
    assert here.torch == str(torch.__version__)
    assert here.triton
    assert here.machine == replace(here, library="") == Versions.here()


def test_what_is_not_known_is_empty(fake_gpu, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(versions, "DRIVER_FILE", Path("/nowhere"))
    monkeypatch.setattr(versions, "MAPS_FILE", Path("/nowhere"))
    here = Versions.here()
    assert (here.driver, here.cublas) == ("", "")


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs)\nGCC version: 12",
            "575.57.08",
        ),
        ("something else", ""),
    ],
)
def test_the_kernel_module_says_its_version(text, driver):
    assert versions.driver_in(text) == driver


@pytest.mark.parametrize(("number", "words"), [(130101, "13.1.1"), (120804, "12.8.4"), (130002, "13.0.2")])
def test_cublas_tells_its_version_as_a_number(number, words):
    assert versions.cublas_words(number) == words


def test_every_field_that_differs_has_a_line():
    found = Measurements.of([measurement(gemm(64, 64, 64))], HOPPER)
    assert found.stale(HOPPER) == ()
    assert found.stale(replace(HOPPER, library="1.6.0")) == ()
    assert found.stale(replace(HOPPER, driver="580.65.06")) == (
        "driver: measured with 575.57.08, this machine has 580.65.06",
    )
    assert found.stale(replace(HOPPER, cublas="")) == (
        "cuBLAS: measured with 13.0.2, this machine has none that is known",
    )
    other = Versions(*(f"other {field.name}" for field in fields(Versions)))
    assert [line.split(":")[0] for line in found.stale(other)] == [
        "device", "capability", "driver", "CUDA", "cuBLAS", "torch", "Triton",
    ]  # fmt: skip
