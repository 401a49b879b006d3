"""One operator for rows of several widths: kernels that they share, widths that it refuses, packages that differ."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from loka.errors import InputError
from loka.kernels.fused import operators
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.rendering import render_all
from loka.templating.templates import load_templates
from tests.support.importing import import_folder
from tests.support.kernels.rendered_cases import PARTS, norm_specs, random_inputs, write_package

RANKER = Path(__file__).parents[3] / "generated" / "ranker"


def quantizer(width: int) -> NormForward:
    return NormForward(width, None, False, False, 0.0, None, False, True, True)


def kernels_of(text: str) -> dict[str, ast.FunctionDef]:
    """The jitted kernels in a text by name, in order."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {each.name: each for each in functions if each.decorator_list and each.name.startswith("_")}


def test_widths_of_one_structure_share_a_kernel():
    (quantize,) = render_all(map(quantizer, (512, 256, 64, 128)), load_templates())
    assert quantize.function == "quantize_e4m3"
    assert list(kernels_of(quantize.text)) == ["_quantize_e4m3", "_quantize_e4m3_single_row"]
    assert [(it.width, it.kernel, it.constants) for it in quantize.launches] == [
        (64, "_quantize_e4m3", (64, 16)),
        (128, "_quantize_e4m3", (128, 8)),
        (256, "_quantize_e4m3", (256, 4)),
        (512, "_quantize_e4m3_single_row", (512,)),
    ]


def test_other_structures_have_kernels_that_say_how_they_differ():
    (quantize,) = render_all(map(quantizer, (64, 13, 479, 512)), load_templates())
    by_width = {it.width: it.kernel.removeprefix("_quantize_e4m3") for it in quantize.launches}
    assert by_width == {13: "_masked", 64: "", 479: "_masked_single_row", 512: "_single_row"}
    assert sorted(kernels_of(quantize.text)) == sorted(it.kernel for it in quantize.launches)


@pytest.mark.parametrize("spec", norm_specs(8, PARTS), ids=lambda spec: spec.function)
def test_every_width_is_launched_as_it_would_be_alone(spec):
    specs = {width: dataclasses.replace(spec, width=width) for width in (13, 64, 200, 256, 479, 512, 2048, 4096)}
    (together,) = render_all(specs.values(), load_templates())
    kernels = kernels_of(together.text)
    assert [it.width for it in together.launches] == list(specs)
    for it in together.launches:
        usual = configuration(specs[it.width])
        (alone,) = render_all([specs[it.width]], load_templates())
        assert dataclasses.replace(it, kernel=f"_{spec.function}") == alone.launches[0]
        assert (it.warps, it.most_programs) == (usual.warps, usual.programs)
        assert set(it.constants) == {it.width, padded_width(it.width), usual.rows, usual.stages} - {1}
        (own,) = kernels_of(alone.text).values()
        shared = kernels[it.kernel]
        assert ast.unparse([own.args, *own.body]) == ast.unparse([shared.args, *shared.body])


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


def test_one_kernel_for_specs_that_the_text_does_not_tell_apart():
    backwards = [NormBackward(64, "layer_norm", True, True, eps, None, False, True) for eps in (1e-5, 1e-6)]
    (rendered,) = render_all(backwards, load_templates())
    assert len(rendered.launches) == 1


def test_packages_with_other_widths_have_other_operators(tmp_path):
    """In one process: neither takes the other's place, neither takes the other's widths."""
    first = write_package(tmp_path / "first_widths", [quantizer(24), quantizer(64)])
    second = write_package(tmp_path / "second_widths", [quantizer(64), quantizer(479)])
    names = [package.kernels["quantize_e4m3"].name for package in (first, second)]
    assert len(set(names)) == 2
    assert all(name in operators._cuda for name in names)
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


def test_a_width_may_be_symbolic_where_the_compiler_traces_a_launch(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    package = write_package(tmp_path / "traced_widths", [quantizer(24), quantizer(64)])
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(operators, "launch", lambda *given, constants, num_warps: launched.append(constants))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    for width in (24, 64):
        x = mode.from_tensor(torch.zeros(5, width), symbolic_context=dynamic)
        with mode:
            results = package.fused._quantize_e4m3_outputs(x)
            package.triton_kernels.quantize_e4m3(*results, x)
        assert results[0].shape[1] == width
        assert isinstance(results[0].shape[0], torch.SymInt)
    assert launched == [it.constants for it in package.kernels["quantize_e4m3"].launches]


def test_the_ranker_has_a_quantizer_of_activations_and_one_for_the_weights_of_each_chain():
    text = (RANKER / "triton_kernels.py").read_text(encoding="utf-8")
    quantizers = [name for name in kernels_of(text) if name.startswith("_quantize")]
    assert quantizers == [
        "_quantize_e4m3",
        "_quantize_weights_128_256_256",
        "_quantize_weights_512_256_256",
    ]
    import_folder(RANKER)
    fused = importlib.import_module("ranker.fused")
    assert fused.quantize_e4m3(torch.ones(2, 512))[0].shape == (2, 512)


def test_its_files_are_short():
    """They were 1829 and 873 lines when each width had its own kernel, and each kernel three copies of its shapes."""
    lines = {
        name: len((RANKER / name).read_text(encoding="utf-8").splitlines())
        for name in ("triton_kernels.py", "fused.py")
    }
    assert lines["triton_kernels.py"] < 1050
    assert lines["fused.py"] < 620
