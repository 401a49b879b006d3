"""What a person may ask for, and what is refused, before anything is measured."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from loka.bench import machine
from loka.bench.machine import require_gpu
from loka.bench.results import Cell, Section
from loka.bench.speed import request
from loka.bench.speed.region_speed import DEFAULT_SHAPES, Form, Shape, check_shape, parse_shape
from loka.bench.speed.request import BenchJob, Request, check, run
from loka.bench.speed.timing import Timing
from loka.bench.subjects.variants import NAMES, choose, variants_named
from loka.errors import InputError


def test_without_a_list_every_variant_is_chosen() -> None:
    assert choose(None) == NAMES
    assert [variant.name for variant in variants_named(NAMES)] == list(NAMES)


def test_a_list_chooses_in_the_usual_order() -> None:
    assert choose("loka-fp8, bf16") == ("bf16", "loka-fp8")
    assert [variant.name for variant in variants_named(choose("loka-fp8,bf16"))] == ["bf16", "loka-fp8"]


@pytest.mark.parametrize(("text", "message"), [("bf17", "no 'bf17'.*did you mean bf16"), (" , ", "names none")])
def test_lists_that_choose_nothing_known(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--variants: .*{message}"):
        choose(text)


def test_the_default_shapes_are_the_seven() -> None:
    assert len(DEFAULT_SHAPES) == 7
    assert DEFAULT_SHAPES[0] == Shape(4096, 512, 512)
    assert DEFAULT_SHAPES[-1] == Shape(8192, 4096, 4096)


def test_shapes_are_m_n_k() -> None:
    assert parse_shape("8192,2048,1024") == Shape(m=8192, n=2048, k=1024)
    assert parse_shape("8192x2048") == Shape(m=8192, n=2048, k=2048)
    assert str(Shape(1, 2, 3)) == "1 x 2 x 3"


@pytest.mark.parametrize("text", ["8192", "1,2,3,4", "a,b", "0,512", "-1,512", "512,", "1.5,2"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(InputError, match="is no shape; write M,N,K"):
        parse_shape(text)


def test_blocks_must_fill_a_block_norm_region() -> None:
    check_shape(Form.BLOCK_NORM, Shape(64, 512, 100))
    check_shape(Form.LAYER_NORM, Shape(64, 300, 100))
    with pytest.raises(InputError, match="N = 300 is no multiple of 256"):
        check_shape(Form.BLOCK_NORM, Shape(64, 300, 100))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request("regio"), "no 'regio' to measure; write one of kernels, region, model$"),
        (Request("region", ("12",)), "is no shape"),
        (Request("region", form="norm"), "--form: there is no 'norm'; write one of layer-norm, block-norm"),
        (Request("region", ("64,300",), form="block-norm"), "no multiple of 256"),
        (Request("region", only="both"), "--only: there is no 'both'"),
        (Request("kernels", form="layer-norm"), "--form is for `loka bench region`"),
        (Request("kernels", ("norm",)), "no family 'norm'.*there are norm-forward"),
        (Request("kernels", only="train"), "leave --only out"),
        (Request("kernels", ("requantize-transpose",), variants="bf16"), "those of the family gemm"),
        (Request("kernels", variants="loka-fp8"), "--variants: there is no 'loka-fp8'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(asked: Request, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(asked)


def test_a_command_can_be_typed_again() -> None:
    asked = Request("region", ("8192,2048,2048",), "block-norm", "train", "bf16,loka-fp8")
    expected = "loka bench region 8192,2048,2048 --form block-norm --only train --variants bf16,loka-fp8"
    assert asked.command() == expected


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"no CUDA device is visible.*run it on a machine with an H100"):
        require_gpu()


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "an older one")
    with pytest.raises(InputError, match=r"an older one has compute capability 8.0"):
        require_gpu()


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(machine, "version_of", lambda *names: None)
    with pytest.raises(InputError, match="Triton is not installed"):
        require_gpu()


def test_a_run_reports_what_was_asked_and_where_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = Section("one", (Cell("work", "bf16", Timing(1.0, 1.0, 1.0, 1)),), "bf16")
    asked = Request("region", ("64,256,256",), only="infer")
    monkeypatch.setattr(request, "require_gpu", lambda: None)
    monkeypatch.setattr(request, "check", lambda given: BenchJob(given, (), lambda progress: (section,)))
    report = run(asked, tmp_path, print, datetime(2026, 11, 21, 8, 12, 30, tzinfo=UTC))
    assert (report.what, report.date, report.sections) == ("region", "2026-11-21T08:12Z", (section,))
    assert report.command == "loka bench region 64,256,256 --only infer"
    assert report.environment == machine.environment()


def test_arguments_and_gpu_come_before_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="is no shape"):
        run(Request("region", ("12",)), tmp_path / "new", print)
    with pytest.raises(InputError, match="no CUDA device"):
        run(Request("region"), tmp_path / "new", print)
    assert not (tmp_path / "new").exists()
