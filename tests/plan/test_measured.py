"""The measurements that a policy names, found when it is planned, with the place of the field where they are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loka.errors import InputError
from loka.kernels.measurements import recording
from loka.kernels.measurements.lookup import export
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import open_measurements
from loka.plan.planner import make_plan, planned
from tests.support.plan.measured_cases import HOPPER, gemm, grid, record

HEAD = 'version: 1\nname: shop\nmodel: {factory: "small:build", inputs: "small:inputs", batch_size: 64}\n'
MODEL = """\
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 32))


def inputs(batch_size):
    return (torch.randn(batch_size, 32),)
"""


@pytest.fixture
def write(write_module):
    """Writes policies/shop.yaml beside a model, in an empty current folder."""
    write_module("small", MODEL)
    Path("policies").mkdir()

    def policy(text: str) -> str:
        Path("policies/shop.yaml").write_text(HEAD + text)
        return "policies/shop.yaml"

    return policy


def test_they_lie_relative_to_the_policy(write):
    record(Path("policies/measured/h100.jsonl"), grid())
    found = planned(write("measurements: measured/h100.jsonl\n")).measurements
    assert (found.name, len(found)) == ("measured/h100.jsonl", 64)


def test_they_lie_relative_to_the_base_that_names_them(write):
    record(Path("shared/h100.jsonl"), grid())
    Path("shared/base.yaml").write_text(HEAD + "measurements: h100.jsonl\n")
    found = open_measurements(load_policy(write("extends: ../shared/base.yaml\n")))
    assert found.name == "../shared/h100.jsonl"


def test_named_absolutely_they_go_by_their_last_part(write, tmp_path):
    record(tmp_path / "h100.jsonl", grid())
    assert open_measurements(load_policy(write(f"measurements: {tmp_path}/h100.jsonl\n"))).name == "h100.jsonl"


def test_as_text_they_are_the_same(write):
    export(record(Path("h100.jsonl"), grid()), "policies/h100.jsonl", "h100", "made up")
    found = open_measurements(load_policy(write("measurements: h100.jsonl\n")))
    assert found.sha256 == open_measurements(load_policy(write("measurements: ../h100.jsonl\n"))).sha256


def test_a_policy_that_names_none_gets_the_set_of_its_target(write, monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "DATA", tmp_path / "data")
    assert open_measurements(load_policy(write(""))) is None
    export(record(Path("h100.jsonl"), grid()), tmp_path / "data" / "h100.jsonl", "h100", "made up")
    assert open_measurements(load_policy(write(""))).time(gemm(64, 64, 64)) is not None
    assert open_measurements(load_policy(write("target: h200\n"))) is None
    assert open_measurements(load_policy(write("target: reference\n"))) is None


def test_the_reference_path_has_none_to_name(write):
    record(Path("policies/m.jsonl"), grid())
    with pytest.raises(InputError, match=r"shop\.yaml:5:15: measurements: the reference path has no kernels .* leave"):
        open_measurements(load_policy(write("target: reference\nmeasurements: m.jsonl\n")))


def newer(path: Path) -> None:
    record(path, grid())
    path.write_text(path.read_text().replace('"version": 2', '"version": 99', 1))


def other_device(path: Path) -> None:
    record(path, grid(), replace(HOPPER, device="NVIDIA H200"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b""), "empty; record measurements"),
        (lambda path: path.write_bytes(b"SQLite format 3\x00"), "SQLite, as LoKA 0.1 recorded; write it with LoKA 0.1"),
        (newer, "written by a newer LoKA (version 99"),
        (other_device, "nothing was measured on a device of target h100: it has measurements of NVIDIA H200"),
    ],
)
def test_what_is_wrong_with_them_is_said_at_the_place_of_the_field(write, make, says):
    path = Path("policies/m.jsonl")
    make(path)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        make_plan(write("measurements: m.jsonl\n"))
    assert str(caught.value).startswith(f"policies/shop.yaml:4:15: measurements: policies/m.jsonl: {says}")
    assert path.read_bytes() == before
