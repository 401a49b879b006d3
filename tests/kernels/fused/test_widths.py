"""One operator for rows of several widths: kernels that they share, widths that it refuses, packages that differ."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from loka.errors import InputError
from loka.kernels.fused import operators
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.rendering import render_all
from tests.support.importing import import_folder
from tests.support.kernels.rendered_cases import PARTS, norm_specs, random_inputs, write_package

RANKER = Path(__file__).parents[3] / "generated" / "ranker"


def quantizer(width: int) -> NormForward:
    return NormForward(width, None, False, False, 0.0, None, False, True, True)


def test_one_operator_has_a_launch_for_each_width():
    (quantize,) = render_all(map(quantizer, (512, 256, 64, 13)))
    assert quantize.function == "quantize_e4m3"
    assert list(quantize.operator.launches) == [13, 64, 256, 512]
    assert [it.rows for it in quantize.operator.launches.values()] == [64, 16, 4, 1]


@pytest.mark.parametrize("spec", norm_specs(8, PARTS), ids=lambda spec: spec.function)
def test_every_width_is_launched_as_it_would_be_alone(spec):
    specs = {width: dataclasses.replace(spec, width=width) for width in (13, 64, 200, 256, 479, 512, 2048, 4096)}
    (together,) = render_all(specs.values())
    assert list(together.operator.launches) == list(specs)
    for width, it in together.operator.launches.items():
        usual = configuration(specs[width])
        (alone,) = render_all([specs[width]])
        assert alone.operator.launches == {width: it}
        assert (it.rows, it.warps, it.programs, it.held, it.stages) == (
            usual.rows, usual.warps, usual.programs, usual.held, usual.stages
        )  # fmt: skip


def test_all_widths_run_and_another_is_refused(tmp_path):
    package = write_package(tmp_path / "several_widths", [quantizer(width) for width in (13, 64, 479)])
    for width in (13, 64, 479):
        x = random_inputs(5, width, torch.bfloat16).tensors["x"]
        got, expected = package.run(quantizer(width), x), norm_reference.quantize_rows(x)
        assert torch.equal(got["values"].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(got["scale"], expected[1])
    for x in (torch.zeros(5, 128), torch.zeros(64), torch.zeros(5, 64, dtype=torch.int32)):
        with pytest.raises(InputError, match="floating rows of 13, 64 or 479 elements"):
            package.run(quantizer(64), x)


def test_an_operator_of_one_width_says_which(tmp_path):
    package = write_package(tmp_path / "one_width", [quantizer(64)])
    with pytest.raises(InputError, match=r"kernel for floating rows of 64 elements got torch\.float32"):
        package.run(quantizer(64), torch.zeros(5, 8))


def test_one_kernel_for_specs_that_the_text_does_not_tell_apart():
    backwards = [NormBackward(64, "layer_norm", True, True, eps, None, False, True) for eps in (1e-5, 1e-6)]
    (rendered,) = render_all(backwards)
    assert len(rendered.operator.launches) == 1


def test_packages_with_other_widths_have_other_operators(tmp_path):
    """In one process: neither takes the other's place, neither takes the other's widths."""
    first = write_package(tmp_path / "first_widths", [quantizer(24), quantizer(64)])
    second = write_package(tmp_path / "second_widths", [quantizer(64), quantizer(479)])
    names = [package.fused.quantize_e4m3.overload.name() for package in (first, second)]
    assert len(set(names)) == 2
    assert all(name.partition("::")[2] in operators._cuda for name in names)
    for package, widths, other in ((first, (24, 64), 479), (second, (64, 479), 24)):
        for width in widths:
            assert package.run(quantizer(width), torch.ones(2, width))["scale"].tolist() == [[2.0**-8]] * 2
        with pytest.raises(InputError, match=f"rows of {widths[0]} or {widths[1]} elements"):
            package.run(quantizer(other), torch.ones(2, other))


def test_a_compiled_model_calls_it_at_several_widths(tmp_path):
    package = write_package(tmp_path / "compiled_widths", [quantizer(24), quantizer(64)])
    quantize = package.fused.quantize_e4m3

    def step(x: torch.Tensor) -> torch.Tensor:
        values, scale, _ = quantize(x)
        return values.float() * scale

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, width in ((4, 24), (7, 24), (5, 64), (9, 64)):
        x = random_inputs(rows, width, torch.float32).tensors["x"]
        assert torch.equal(compiled(x), step(x))


def test_a_width_may_be_symbolic_where_the_compiler_traces_a_launch(tmp_path):
    pytest.importorskip("triton")
    package = write_package(tmp_path / "traced_widths", [quantizer(24), quantizer(64)])
    launched: list[object] = []

    def launch(*given: object, constants: tuple[object, ...], num_warps: int) -> None:
        launched.append(constants[0])

    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    for width in (24, 64):
        x = mode.from_tensor(torch.zeros(5, width), symbolic_context=dynamic)
        with mode:
            results = package.fused.quantize_e4m3.operator.outputs(x)
            package.fused.quantize_e4m3.operator.launch(package.triton_kernels, results, (x,), launch)
        assert results[0].shape[1] == width
        assert isinstance(results[0].shape[0], torch.SymInt)
    assert launched == [24, 64]


def test_the_ranker_has_a_quantizer_of_activations_and_one_for_the_weights_of_all_chains():
    import_folder(RANKER)
    fused = importlib.import_module("ranker.fused")
    assert [name for name in vars(fused) if name.startswith("quantize")] == ["quantize_e4m3", "quantize_weights"]
    assert fused.quantize_e4m3(torch.ones(2, 2048))[0].shape == (2, 2048)
    assert [each.shape for each in fused.quantize_weights([torch.ones(2, 2048), torch.ones(3, 2048)])[::3]] == [
        (2, 2048),
        (3, 2048),
    ]
