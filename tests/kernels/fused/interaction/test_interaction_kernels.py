"""Kernels of FM and dot interactions and concat norms without a GPU: references in float64, refusals, shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.interaction.concat_norm import ConcatNormForward
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmSizes, unsupported_reason
from tests.support.kernels.interaction_cases import (
    CONCAT_NORMS,
    DOTS,
    LARGE,
    SIZES,
    concat_norm_inputs,
    concat_norm_specs,
    dot_inputs,
    dot_specs,
    exact_concat_norm,
    exact_dot,
    exact_fm,
    fm_inputs,
    fm_specs,
    summed,
)
from tests.support.kernels.rendered_cases import write_package


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for sizes in (*SIZES, LARGE) for spec in fm_specs(sizes)]
    specs += [spec for case in CONCAT_NORMS for spec in concat_norm_specs(case)]
    specs += [spec for sizes in DOTS for spec in dot_specs(sizes)]
    return write_package(tmp_path_factory.mktemp("interactions") / "interactions_package", specs)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fm_interaction_is_what_torch_computes(package, sizes, dtype):
    inputs = fm_inputs(sizes, 5, dtype)
    exact = exact_fm(sizes, inputs)
    for spec in fm_specs(sizes):
        for name, result in package.run(spec, *(inputs[p] for p in spec.parameters)).items():
            error = (summed(name, result.double(), exact[name]) - exact[name]).abs().max() / exact[name].abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 0.01), (spec, name, error)


@pytest.mark.parametrize("case", CONCAT_NORMS, ids=lambda case: concat_norm_specs(case)[0].function)
def test_a_concat_norm_is_what_torch_computes(package, case):
    inputs = concat_norm_inputs(case, 5, torch.float32)
    exact = exact_concat_norm(case, inputs)
    forward, backward = concat_norm_specs(case)
    got = package.run(forward, *(inputs[p] for p in forward.parameters), torch.float32)
    known = {**inputs, **got}
    got |= package.run(backward, *(known[p] for p in backward.parameters))
    assert set(got) == {*forward.results, *backward.results}
    for name, result in got.items():
        error = (summed(name, result.double(), exact[name]) - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-5, (name, error)


def test_a_concat_norm_has_the_dtype_that_it_is_asked_for_and_the_gradient_the_wider_one(package):
    forward, backward = concat_norm_specs(CONCAT_NORMS[0])
    inputs = {**concat_norm_inputs(CONCAT_NORMS[0], 3, torch.bfloat16)}
    inputs["residual"] = inputs["residual"].float()
    got = package.run(forward, *(inputs[p] for p in forward.parameters), torch.float16)
    assert got["out"].dtype == torch.float16
    known = {**inputs, **got}
    assert package.run(backward, *(known[p] for p in backward.parameters))["dx"].dtype == torch.float32


@pytest.mark.parametrize("sizes", DOTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dot_interaction_is_what_torch_computes(package, sizes, dtype):
    inputs = dot_inputs(sizes, 5, dtype)
    exact = exact_dot(inputs)
    for spec in dot_specs(sizes):
        for name, result in package.run(spec, *(inputs[p] for p in spec.parameters)).items():
            assert result.dtype == dtype
            error = (result.double() - exact[name]).abs().max() / exact[name].abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 0.01), (spec, name, error)


def test_shapes_for_the_compiler_are_those_of_the_reference(package):
    for sizes in SIZES:
        inputs = fm_inputs(sizes, 3, torch.bfloat16)
        for spec in fm_specs(sizes):
            check_fake(package, spec, [inputs[p] for p in spec.parameters])
    for sizes in DOTS:
        inputs = dot_inputs(sizes, 3, torch.bfloat16)
        for spec in dot_specs(sizes):
            check_fake(package, spec, [inputs[p] for p in spec.parameters])
    for case in CONCAT_NORMS:
        inputs = concat_norm_inputs(case, 3, torch.bfloat16)
        forward, backward = concat_norm_specs(case)
        known = {**inputs, **check_fake(package, forward, [*(inputs[p] for p in forward.parameters), torch.bfloat16])}
        check_fake(package, backward, [known[p] for p in backward.parameters])


def check_fake(package, spec, arguments):
    real = package.run(spec, *arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = package.run(spec, *faked)
    for name, result in real.items():
        assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype), (spec, name)
    return real


def test_a_sample_of_another_shape_is_refused(package):
    forward, _ = fm_specs(SIZES[0])
    inputs = fm_inputs(replace(SIZES[0], dim=24), 3, torch.float32)
    with pytest.raises(InputError, match=r"16 embeddings of 16 elements got torch\.float32 of shape \(3, 16, 24\)"):
        package.run(forward, *(inputs[p] for p in forward.parameters))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 16, 4, 4), "1 or more"),
        ((128, 512, 4, 4), "32768 elements"),
        ((16, 64, 48, 4), "no more than the embeddings"),
        ((16, 64, 4, 48), "no more than the embeddings"),
        ((512, 32, 4, 4), "256 embeddings"),
        ((256, 64, 128, 64), "both matrices together may have 32768 elements"),
    ],
)
def test_sizes_without_a_kernel_are_refused(sizes, said):
    assert said in unsupported_reason(*sizes)
    with pytest.raises(InputError, match=said):
        FmSizes(*sizes)


@pytest.mark.parametrize(
    ("sizes", "said"), [((0, 16), "1 or more"), ((129, 16), "128 embeddings"), ((64, 512), "16384 elements")]
)
def test_dot_interactions_without_a_kernel_are_refused(sizes, said):
    with pytest.raises(InputError, match=said):
        DotSpec(*sizes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((0, 2, True, "layer_norm", True, True, 1e-5), "0 wide"),
        ((16, 5, True, "layer_norm", True, True, 1e-5), "1 to 4 parts"),
        ((16, 1, False, "layer_norm", True, True, 1e-5), "is a norm"),
        ((16, 2, True, "batch_norm", True, True, 1e-5), "batch_norm"),
        ((16, 2, True, "layer_norm", True, True, -1.0), "eps"),
    ],
)
def test_concat_norms_without_a_kernel_are_refused(fields, said):
    with pytest.raises(InputError, match=said):
        ConcatNormForward(*fields)
