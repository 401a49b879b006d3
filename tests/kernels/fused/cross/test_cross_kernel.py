"""The kernel of a cross layer's gradients without a GPU: reference, shapes, refusals, the interpreter, sm_90."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.cross.cross_kernel import CrossBackward
from tests.support.kernels.cross_cases import LARGE, SPECS, check, inputs_of
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import reads_sixteen_bytes, write_package


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("cross") / "cross_package", [*SPECS, LARGE])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_what_torch_computes(package, spec, dtype):
    for rows in (1, 9):
        inputs = inputs_of(spec, rows, dtype)
        got = package.run(spec, *(inputs[name] for name in spec.parameters))
        check(spec, got, inputs, 1e-6 if dtype == torch.float32 else 0.01)


def test_each_gradient_has_the_dtype_of_what_it_is_for(package):
    spec = SPECS[0]
    inputs = inputs_of(spec, 4, torch.float32)
    inputs["product"] = inputs["product"].bfloat16()
    inputs["factor"] = inputs["factor"].half()
    got = package.run(spec, *(inputs[name] for name in spec.parameters))
    assert [result.dtype for result in got.values()] == [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.slow
def test_shapes_for_the_compiler_are_those_of_the_reference(package):
    for spec in SPECS:
        inputs = inputs_of(spec, 5, torch.bfloat16)
        arguments = [inputs[name] for name in spec.parameters]
        real = package.run(spec, *arguments)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = package.run(spec, *map(mode.from_tensor, arguments))
        for name, result in real.items():
            assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype), (spec, name)


def test_other_widths_are_refused(package):
    inputs = inputs_of(CrossBackward(64, True, True, True), 3, torch.float32)
    with pytest.raises(InputError, match=r"rows of 96 elements got torch\.float32 of shape \(3, 64\)"):
        package.run(SPECS[0], *(inputs[name] for name in SPECS[0].parameters))
    with pytest.raises(InputError, match="no cross layer is 20000 wide"):
        CrossBackward(20000, True, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LARGE, SPECS[0]], ids=lambda spec: spec.function)
@pytest.mark.usefixtures("triton_cache")
def test_it_compiles_for_hopper(package, spec):
    from tests.support.kernels.sm90 import compiled

    binary = compiled(package, spec, odd="m")
    assert binary.metadata.shared <= 64 * 1024
    assert reads_sixteen_bytes(binary.asm["ptx"])
    assert ".local" not in binary.asm["ptx"]
    assert not unset_halves(binary.asm["ptx"])
