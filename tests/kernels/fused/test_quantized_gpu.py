"""Modes of quantization on a Hopper GPU: against float64, against the CPU reference bit for bit, in one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import CastTranspose
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.quantization import Quantization
from loka.numerics.enums import Format
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.drawn_inputs import KINDS, check_mode, corners, drawn_inputs, exact_result, last_arguments
from tests.support.kernels.fp8_codes import same_nan_of
from tests.support.kernels.quantized_cases import CAST_TRANSPOSES, modes, specs
from tests.support.kernels.rendered_cases import arguments_of, random_inputs, write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

FEW = [
    Quantization("blockwise"),
    Quantization("static"),
    Quantization("static", Format.E5M2, power_of_two=False),
    Quantization("tensorwise"),
    Quantization("maximum"),
]
WIDTHS = (13, 200, 624, 2048, 8256)
SPECS = {width: specs(width, FEW) for width in WIDTHS}
BARE = {
    (width, how): NormForward(width, None, False, False, 1e-5, None, False, True, how.scaling != "maximum", how=how)
    for width in (479, 2048)
    for how in modes()
}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    every = [*(spec for width in WIDTHS for spec in SPECS[width]), *BARE.values(), *CAST_TRANSPOSES]
    return write_package(tmp_path_factory.mktemp("gpu") / "rendered_modes_gpu", every)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_against_float64(package, width, kind):
    for rows in (1, 17, 4093):
        seed = int(torch.randint(2**31, ()))  # fresh in each run; in the message if it fails
        inputs = drawn_inputs(kind, rows, width, torch.bfloat16, "cuda", seed)
        for spec in SPECS[width]:
            y, noise = exact_result(spec, inputs)
            last = last_arguments(spec, y)
            try:
                check_mode(package.run(spec, *arguments_of(spec, inputs), *last), spec, y, noise, last)
            except AssertionError as error:
                raise AssertionError(f"{spec.function}, {rows} rows, seed {seed}") from error


@pytest.mark.parametrize(("width", "how"), BARE, ids=str)
def test_plain_quantization_is_the_reference_bit_for_bit(package, width, how):
    spec, x = BARE[width, how], corners(4093, width)
    largest = torch.where(x.isfinite(), x.abs(), 0.0).max().float()
    scale = 2.0**-3 if how.power_of_two else 0.1
    last = {"scale": torch.full((1, 1), scale, device="cuda"), "maxima": torch.stack([largest * 0.0, largest])}
    arguments = [x, *(last[name] for name in how.parameters)]
    got, expected = package.run(spec, *arguments), package.run(spec, *(argument.cpu() for argument in arguments))
    for name in how.results:
        ours, theirs = got[name].cpu(), expected[name]
        if name == "values":
            assert torch.equal(same_nan_of(ours), same_nan_of(theirs))
        elif name == "scale":
            assert torch.equal(ours, theirs)
        elif name == "overflow":
            assert ours.sum() == theirs.sum() > 0
        else:
            assert ours.max() == theirs.max()


def test_two_launches_find_the_tensors_scale_on_the_device(package):
    width, x = 2048, corners(4093, 2048)
    whole = BARE[width, Quantization("tensorwise")]
    maxima = package.run(BARE[width, Quantization("maximum")], x)["amax"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = package.run(whole, x, maxima)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = package.run(whole, x.cpu(), maxima.cpu())
    assert torch.equal(got["scale"].cpu(), expected["scale"])
    assert torch.equal(same_nan_of(got["values"].cpu()), same_nan_of(expected["values"]))


@pytest.mark.parametrize("spec", CAST_TRANSPOSES, ids=lambda spec: spec.function)
@pytest.mark.parametrize("shape", [(17, 13), (4093, 479), (4096, 2048), (17, 8256), (0, 24)])
def test_both_copies_are_the_reference_bit_for_bit(package, spec, shape):
    x = corners(*shape) if shape[0] > 11 and shape[1] > 9 else torch.zeros(shape, device="cuda")
    largest = torch.where(x.isfinite(), x.abs(), 0.0).float()
    maxima = largest.max().view(1) if x.numel() else torch.zeros(1, device="cuda")
    scale = torch.full((1, 1), 2.0**-3 if spec.how.power_of_two else 0.1, device="cuda")
    last = scale if spec.how.scaling == "static" else maxima
    got, expected = package.run(spec, x, last), package.run(spec, x.cpu(), last.cpu())
    for name in ("values", "transposed"):
        assert got[name].is_contiguous()
        assert torch.equal(same_nan_of(got[name].cpu()), same_nan_of(expected[name]))
    for name in spec.results[2:]:
        ours, theirs = got[name].cpu(), expected[name]
        assert ours.sum() == theirs.sum() if name == "overflow" else ours.max() == theirs.max()


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_under_the_compiler(package, dynamic):
    known = BARE[2048, Quantization("static")]
    find, whole = BARE[2048, Quantization("maximum")], BARE[2048, Quantization("tensorwise")]
    transposed = CastTranspose(Quantization("static"))
    # Looked up here: under the compiler with changing sizes a spec's width is no longer an int that a name is made of.
    one, maximum, second, copies = (getattr(package.fused, spec.function) for spec in (known, find, whole, transposed))

    def step(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        values, amax, overflow = one(x, scale)
        rest, found = second(x, maximum(x))
        both = copies(x, scale)
        return values.float(), amax.amax(), overflow.sum(), rest.float(), found, *(part.float() for part in both)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    scale = torch.full((1, 1), 2.0**-3, device="cuda")
    for rows in (256, 17, 4093) if dynamic else (256,):
        x = random_inputs(rows, 2048, torch.bfloat16, "cuda").tensors["x"]
        for ours, eager in zip(compiled(x, scale), step(x, scale), strict=True):
            assert torch.equal(ours, eager)
