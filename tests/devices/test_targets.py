"""The table of devices: complete, asked by everything that depends on a device, and the only place that knows one."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import loka
from loka.devices.targets import (
    DEFAULT,
    DEVICES,
    GPU_TARGETS,
    GPUS,
    device_named,
    spec_of,
)
from loka.errors import InputError
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.quantization import Quantization
from loka.kernels.fused.rendering import render
from loka.kernels.gemm import scaled_mm_operands
from loka.kernels.gemm.catalogue import GEMM_KERNELS, GemmRequest
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.measurement import Measurement
from loka.kernels.measurements.part_bounds import START_US, bound_us, interaction_us
from loka.kernels.measurements.parts import Part, PartKind
from loka.kernels.measurements.versions import Versions
from loka.numerics.enums import Accumulation, Format, Gemm, Scaling
from loka.numerics.recipe import OperandRecipe

HALF = replace(DEFAULT, bandwidth=DEFAULT.bandwidth / 2, interaction_bandwidth=DEFAULT.interaction_bandwidth / 2)
NORM = NormForward(1024, "layer_norm", True, True, 1e-5, None, False, True, True)


@pytest.mark.slow
def test_every_target_has_its_device() -> None:
    for target, device in DEVICES.items():
        assert device.name == target
        assert spec_of(target) is device
        assert {"e4m3", "e4m3 fast", "bfloat16", "float16", "float32"} <= set(device.flops)
    assert [target for target, device in DEVICES.items() if device.is_reference] == ["reference"]
    assert (DEFAULT.name, DEFAULT) == ("h100", DEVICES["h100"])
    assert GPU_TARGETS == ("h100", "h100-pcie", "h200", "h20", "b200", "gb200", "mi300x", "mi350x")
    assert GPUS == "H100, H100 PCIe, H200, H20, B200, GB200, MI300X or MI350X"
    measured = [device.measured_on for device in DEVICES.values() if device.measured_on]
    assert measured == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


def test_rates_of_a_device_are_measured_or_of_its_data_sheet() -> None:
    for target in GPU_TARGETS:
        device = spec_of(target)
        assert bool(device.measured_on) != bool(device.data_sheet), target
        assert device.lacks_measurements == bool(device.data_sheet), target
    assert not spec_of("reference").lacks_measurements


def test_an_unknown_target_is_refused_with_those_that_there_are() -> None:
    for name in ("a100", "H100", ""):
        with pytest.raises(InputError, match=f"target '{name}' is not known; it can be {', '.join(DEVICES)}"):
            spec_of(name)
    for kernel in GEMM_KERNELS:
        with pytest.raises(InputError, match="target 'a100' is not known"):
            kernel.unsupported_reason(
                GemmRequest(Gemm.FPROP, (OperandRecipe(),) * 2, Accumulation.PRECISE, True, 64, 64, 64, "a100")
            )


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("AMD Instinct MI355X", None),
        ("NVIDIA GeForce RTX 5090", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, target: str | None) -> None:
    found = device_named(name)
    assert (found and found.name) == target
    assert [each for each in DEVICES if spec_of(each).is_named(name)] == ([target] if target else [])


@pytest.mark.parametrize("kind", [PartKind.COPY, PartKind.QUANTIZE])
def test_a_bound_is_the_devices(kind: PartKind) -> None:
    part = Part(kind, "rendered", 4096, 1024, 0, "bfloat16", "")
    assert bound_us(part, HALF) - START_US == pytest.approx(2 * (bound_us(part) - START_US))


def test_a_products_bound_is_by_the_devices_peak() -> None:
    slow = replace(DEFAULT, flops={**DEFAULT.flops, "e4m3": DEFAULT.flops["e4m3"] / 2})
    fp8, own = (Part(PartKind.GEMM, "k", 8192, 8192, 8192, "bfloat16", recipe) for recipe in ("e4m3 rowwise", ""))
    assert bound_us(fp8, slow) - START_US == pytest.approx(2 * (bound_us(fp8) - START_US))
    assert bound_us(own, slow) == bound_us(own)


@pytest.mark.slow
def test_measurements_are_scaled_by_the_bounds_of_their_device() -> None:
    machine = Versions("NVIDIA H100 80GB HBM3", "9.0", "", "", "", "", "", "")
    parts = [Part(PartKind.COPY, "rendered", rows, 1024, 0, "bfloat16", "bfloat16") for rows in (1024, 65536)]
    found = Measurements.of([Measurement(parts[0], 10.0, 0.0, 9, None, None)], machine)
    assert found.device is DEFAULT
    slow = Measurements(found._set, "slow", HALF)
    for device, measurements in ((DEFAULT, found), (HALF, slow)):
        timed = measurements.time(parts[1])
        assert timed is not None
        assert timed.us == pytest.approx(10.0 * bound_us(parts[1], device) / bound_us(parts[0], device))
    assert found.time(parts[1]) != slow.time(parts[1])
    shipped = Measurements.shipped("h100")
    assert shipped is not None
    assert shipped.device is DEVICES["h100"]


def test_kernels_are_launched_as_their_device_says() -> None:
    usual = configuration(NORM)
    rows = replace(DEFAULT.launches.rows, forward={1024: replace(usual, warps=16, programs=3)})
    other = replace(DEFAULT, launches=replace(DEFAULT.launches, rows=rows))
    assert configuration(NORM, other) == replace(usual, warps=16, programs=3)
    rendered = (render(NORM, device=device) for device in (other, DEVICES["h200"], DEFAULT))
    on_other, on_h200, on_default = (each.operator.launches[1024] for each in rendered)
    assert (on_other.warps, on_other.programs) == (16, 3)
    assert on_h200.stages > 1 == on_default.stages
    assert on_default.warps == usual.warps != 16


def test_one_scale_is_found_and_used_by_few_programs_where_that_was_measured() -> None:
    h200 = DEVICES["h200"]
    rowwise = configuration(replace(NORM, quantize=True), h200)
    for scaling in ("maximum", "tensorwise"):
        spec = replace(NORM, quantize=True, save=False, how=Quantization(scaling))
        found = configuration(spec, h200)
        assert found == h200.launches.rows.forward_tensorwise[1024]
        assert found.programs * h200.multiprocessors < rowwise.programs * h200.multiprocessors
        assert configuration(spec) == configuration(NORM), "not measured on the H100"


def test_scaled_mm_takes_what_the_device_does() -> None:
    scalings, formats = (Scaling.ROWWISE, Scaling.ROWWISE), (Format.E4M3, Format.E4M3)
    assert scaled_mm_operands.refuse_recipe(scalings, formats, Accumulation.FAST) is None
    limits = replace(DEFAULT.scaled_mm, pairs=frozenset({("tensorwise", "tensorwise")}))
    refused = scaled_mm_operands.refuse_recipe(scalings, formats, Accumulation.FAST, limits)
    assert refused == "no kernel multiplies rowwise x rowwise; it takes tensorwise x tensorwise"
    other = replace(DEFAULT.scaled_mm, e4m3="e4m3fnuz")
    refused = scaled_mm_operands.refuse_recipe(scalings, formats, Accumulation.FAST, other)
    assert refused == (
        "its tensor cores multiply e4m3fnuz, whose numbers are not those of the FP8 that LoKA makes, e4m3fn"
    )
    names = {scaling.value for scaling in Scaling}
    for device in DEVICES.values():
        known = device.scaled_mm
        assert {name for pair in known.pairs for name in pair} <= names
        assert known.precise_e4m3 | known.rounded | set(known.row_alignment) | set(known.alignment) <= names
        blocks = any(Scaling.BLOCKWISE_1X128 in pair for pair in known.pairs)
        assert known.row_multiple(Scaling.BLOCKWISE_1X128) == (4 if blocks else 1)
        assert known.row_multiple(Scaling.ROWWISE) == 1


def test_an_interactions_time_by_bytes_is_the_devices() -> None:
    part = Part(PartKind.DOT, "rendered", 4096, 128, 0, "bfloat16", "", "27 embeddings")
    assert interaction_us(part, HALF) - START_US == pytest.approx(2 * (interaction_us(part) - START_US))


@pytest.mark.slow
def test_no_other_module_names_a_device_in_its_code() -> None:
    """Docstrings and comments may say where something was measured; code asks the table."""
    root = Path(loka.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.is_relative_to(root / "devices"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                text = node.value.lower()
                if any(target in text for target in GPU_TARGETS):
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.Constant) and node.value in (DEFAULT.multiprocessors, DEFAULT.bandwidth):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {node.value!r}")
    assert found == []
