"""`loka doctor`: measurements that ship, and what a policy is decided by, on a machine that fits and on others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loka.cli import doctor_items
from loka.kernels.gemm.library import Library
from loka.kernels.measurements import recording
from loka.kernels.measurements.lookup import Versions, export
from loka.probe.profile.profile_file import save
from tests.support.plan.measured_cases import HOPPER, LATER, gemm, grid, measurement, record
from tests.support.plan.shop_profile import SIZES, profile_of

FILE = "policies/h100.jsonl"
HEAD = 'version: 1\nname: shop\nmodel: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}\n'
NAMED = HEAD + "measurements: h100.jsonl\n"


class Absent:
    """A kernel of a library that is not installed."""

    name = "absent.rowwise"

    @property
    def library(self) -> Library:
        return Library("Absent", ("absent-kernels",), (1, 0), "pip install absent-kernels", "absent", "", (9, 0))

    def unavailable_reason(self) -> str:
        return "absent-kernels is not installed"


@pytest.fixture
def machine(monkeypatch) -> Callable[[Versions | None], None]:
    """Says what the current device is."""
    return lambda here: monkeypatch.setattr(doctor_items, "this_device", lambda: here)


@pytest.fixture
def data(monkeypatch, tmp_path_factory) -> Path:
    """The folder of the sets that ship, with one for the H100."""
    folder = tmp_path_factory.mktemp("data")
    export(record(folder / "m.jsonl", grid()), folder / "h100.jsonl", "h100", "made up")
    monkeypatch.setattr(recording, "DATA", folder)
    return folder


@pytest.fixture
def doctor(loka) -> Callable[..., dict[str, tuple[str, str, str]]]:
    """What doctor says, by name, after a check of the exit status."""

    def ask(*arguments: str, status: int = 0) -> dict[str, tuple[str, str, str]]:
        ran = loka("doctor", *arguments, "--json")
        assert ran.status == status, ran.err
        found = json.loads(ran.out)
        assert found["works"] is (status == 0)
        return {item["name"]: (item["status"], item["found"], item["note"]) for item in found["items"]}

    return ask


@pytest.mark.parametrize(
    ("version", "status", "start"),
    [
        ("2.14.1+cu130", "ok", "tested: 2.11 (Hopper GPUs), 2.13 (CPU), "),
        ("2.12.0", "ok", "LoKA was not tested with torch 2.12; tested: 2.11 (Hopper GPUs), "),
        ("3.0.0a0+git1f", "ok", "LoKA was not tested with torch 3.0; tested: 2.11 "),
        ("2.9.1", "problem", "LoKA needs torch 2.11 or newer: pip install"),
    ],
)
def test_which_torch_was_tested_is_said(doctor, monkeypatch, version: str, status: str, start: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = doctor(status=int(status == "problem"))["torch"]
    assert found[:2] == (status, version)
    assert found[2].startswith(start)


def test_without_a_set_it_says_how_to_make_one(doctor, machine, monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "DATA", tmp_path)
    machine(None)
    assert doctor()["measurements h100"] == (
        "missing", "", "none ship for h100; a policy can name its own: loka bench kernels --record FILE",
    )  # fmt: skip


def test_the_set_that_ships_is_described(doctor, machine, data):
    machine(None)
    status, found, note = doctor()["measurements h100"]
    assert (status, found[:11]) == ("ok", "64 parts, 2")
    assert note == f"measured on {HOPPER}; no GPU here to compare with"
    assert str(HOPPER).startswith("NVIDIA H100 80GB HBM3, driver 575.57.08, CUDA 13.0, cuBLAS 13.0.2, torch 2.11")
    assert doctor()["measurements h200"][0] == "missing"


def test_what_differs_here_is_named(doctor, machine, data):
    machine(replace(LATER, triton="3.7.0"))
    status, _, note = doctor()["measurements h100"]
    assert status == "stale"
    assert note.split("; ") == [
        f"measured on {HOPPER}",
        "driver: measured with 575.57.08, this machine has 580.65.06",
        "Triton: measured with 3.6.0, this machine has 3.7.0",
        "plans are the same as on any machine",
        "to decide by this one: loka bench kernels --record FILE, and `measurements: FILE`",
    ]


def test_a_library_that_was_measured_and_is_not_here_is_named(doctor, machine, data, monkeypatch):
    monkeypatch.setattr(doctor_items, "GEMM_KERNELS", (Absent(),))
    path = data / "m.jsonl"
    record(path, [measurement(gemm(64, 64, 64, "absent.rowwise"))], libraries={"absent.rowwise": "1.6.0"})
    export(path, data / "h100.jsonl", "h100", "made up")
    machine(HOPPER)
    status, _, note = doctor()["measurements h100"]
    assert status == "stale"
    assert "; absent.rowwise: measured with 1.6.0, this machine has none that is known; " in note


def test_on_another_device_it_is_for_plans(doctor, machine, data):
    machine(replace(HOPPER, device="NVIDIA H200"))
    assert doctor()["measurements h100"][::2] == (
        "ok", f"measured on {HOPPER}; for plans for h100, this machine has NVIDIA H200",
    )  # fmt: skip


def test_a_damaged_set_is_a_problem(doctor, machine, data):
    machine(None)
    path = data / "h100.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    status, _, note = doctor(status=1)["measurements h100"]
    assert status == "problem"
    assert "cut short or edited" in note


def test_a_policy_that_names_nothing(shop, doctor, machine, monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "DATA", tmp_path)
    machine(None)
    shop.write_policy(HEAD)
    items = doctor(shop.policy)
    assert items["policy target"][:2] == ("ok", "h100")
    assert items["policy measurements"][0] == "missing"
    assert "time decides nothing" in items["policy measurements"][2]
    assert items["policy profile"][0] == "missing"
    assert items["policy profile"][2].endswith("loka probe policies/shop.yaml")


def test_a_policy_goes_by_the_set_that_ships(shop, doctor, machine, data):
    machine(None)
    shop.write_policy(HEAD)
    assert doctor(shop.policy)["policy measurements"][2] == "none named: the set that ships, h100.jsonl of LoKA"


def test_a_policy_with_its_own_measurements(shop, doctor, machine, data):
    shop.write_policy(NAMED)
    record(shop.folder / FILE, [measurement(gemm(64, 64, 64))], LATER)
    record(shop.folder / FILE, [measurement(gemm(64, 64, 64)), measurement(gemm(64, 64, 128))])
    machine(HOPPER)
    status, found, note = doctor(shop.policy)["policy measurements"]
    assert (status, found[:10]) == ("ok", "2 parts, 2")
    assert note.startswith(f"h100.jsonl; measured on {HOPPER}; with what this machine has; 1 measurement on {LATER}, ")
    machine(LATER)
    status, _, note = doctor(shop.policy)["policy measurements"]
    assert status == "stale"
    assert note.startswith(f"h100.jsonl; measured on {HOPPER}; driver: measured with 575.57.08, this machine has ")


@pytest.mark.slow
def test_a_policy_whose_measurements_are_not_there(shop, doctor, machine):
    machine(None)
    shop.write_policy(NAMED)
    status, _, note = doctor(shop.policy, status=1)["policy measurements"]
    assert status == "problem"
    assert note.startswith("policies/shop.yaml:4:15: measurements: policies/h100.jsonl: is not there; make it with")


@pytest.mark.slow
def test_a_target_that_this_machine_is_not(shop, doctor, machine):
    machine(replace(HOPPER, device="NVIDIA H200"))
    shop.write_policy(HEAD)
    status, _, note = doctor(shop.policy)["policy target"]
    assert (status, note[:28]) == ("stale", "this machine has NVIDIA H200")
    shop.write_policy(HEAD + "target: reference\n")
    items = doctor(shop.policy)
    assert items["policy target"][0] == items["policy measurements"][0] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "status", "says"),
    [
        ({**SIZES, "layers.1.down": (32, 24), "head": (32, 1)}, "ok", "has every site of shopmodel:build"),
        (SIZES, "stale", "lacks layers.1.down, head of shopmodel:build: loka probe policies/shop.yaml"),
        ({**SIZES, "dense": (14, 32)}, "problem", "site 'dense' has K = 14, N = 32 in profiles/shop.safetensors"),
    ],
)
def test_whether_the_profile_fits_the_model(sites, status, says, shop, doctor, machine):
    machine(None)
    shop.write_policy(HEAD + "profile: profiles/shop.safetensors\n")
    save(shop.folder / "policies/profiles/shop.safetensors", profile_of({}, sites))
    item = doctor(shop.policy, status=int(status == "problem"))["policy profile"]
    assert item[0] == status
    assert item[1].startswith(f"profiles/shop.safetensors: {len(sites)} sites, 20 of 200 steps, 2026-01-01")
    assert says in item[2]


@pytest.mark.slow
def test_a_profile_that_is_not_there(shop, doctor, machine):
    machine(None)
    shop.write_policy(HEAD + "profile: profiles/shop.safetensors\n")
    status, found, note = doctor(shop.policy, status=1)["policy profile"]
    assert (status, found) == ("problem", "profiles/shop.safetensors")
    assert "is not there: run loka probe" in note


@pytest.mark.slow
def test_a_policy_that_cannot_be_read_is_bad_input(shop, loka):
    shop.write_policy(HEAD + "target: a100\n")
    ran = loka("doctor", shop.policy)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("policies/shop.yaml:4:9: target")
