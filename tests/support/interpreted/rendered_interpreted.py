"""Run by test_interpreted.py: indexing and masks.

The interpreter converts float32 to FP8 and bfloat16 wrongly, but not what these hold exactly. So plain kernels are
compared in float32, and quantizing ones on values that are e4m3 under their row's scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.numerics.quantize import Quantized, requantize_transpose
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.kernels.rendered_cases import (
    BLOCK_PARTS,
    PARTS,
    Package,
    arguments_of,
    norm_specs,
    random_inputs,
    write_package,
)
from tests.support.pairwise import pairwise

Norm = NormForward | NormBackward


def alone(activation: str) -> tuple[NormForward, NormBackward]:
    """Kernels of an activation of 24 elements, and of its gradient."""
    parts = (24, None, False, False, 1e-5, activation, False, False)
    return NormForward(*parts, True), NormBackward(*parts)


STEEP, LEAKY = alone("tanh"), alone("leaky_relu(0.2)")

# By the width's configuration: several rows at a step or one; a power of two or a padded width.
WIDTHS = (13, 16, 24, 256, 479, 512, 600, 768)
ROWS = (1, 17)


def parts_of(width: int) -> list[tuple[str | None, bool, bool, str | None, bool]]:
    """All norms that a kernel of that width can have."""
    return PARTS if width % 256 else BLOCK_PARTS + PARTS[-2:] if width in (256, 768) else PARTS + BLOCK_PARTS


def chosen(specs: Iterable[Norm]) -> list[Norm]:
    """Each pair of parameters, among the kernels that quantize as among those that do not."""
    every = list(specs)
    return [spec for quantize in (False, True) for spec in pairwise(s for s in every if s.quantize is quantize)]


def moved(code: str, constraints: str, operands: list[Any], **options: object) -> Any:
    """Inline assembly that moves a register, which is all of it that kernels have: the interpreter has none."""
    if (code, constraints) != ("mov.b32 $0, $1;", "=r,r"):
        raise ValueError(f"no stand-in for {code!r}")
    return operands[0]


def results(package: Package, spec, *arguments: object) -> dict[str, Tensor]:
    """What the kernel computes in the interpreter."""
    package.triton_kernels.tl.inline_asm_elementwise = moved
    return package.launch(spec, *arguments)


def near(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of sums; NaN, from memory that was never written, is not near anything."""
    size = expected.abs().amax() if expected.numel() else 0.0
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= 1e-5 * size).all())


def check_norms(package: Package, specs: Sequence[Norm]) -> int:
    """Each kernel that quantizes nothing, in float32; how many results were compared."""
    compared = 0
    for spec in specs:
        for rows in ROWS if not spec.quantize else ():
            inputs = random_inputs(rows, spec.width, torch.float32)
            arguments = arguments_of(spec, inputs)
            got, expected = results(package, spec, *arguments), package.run(spec, *arguments)
            for name in spec.results:
                result = got[name]
                if name in ("dweight", "dbias", "dadd"):
                    assert result.shape == (PROGRAMS, spec.width)
                    result = result.sum(0, keepdim=True)
                assert near(result, expected[name]), (spec, rows, name)
                compared += 1
    return compared


def exact_rows(rows: int, width: int) -> Tensor:
    """Rows whose largest element is 448 times a power of two, the others e4m3 values under that."""
    generator = torch.Generator().manual_seed(rows + width)
    codes = torch.randint(0x38, 0x7F, (rows, width), generator=generator, dtype=torch.uint8)  # 1 to 448
    codes[:, 0] = 0x7E
    signs = torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1
    return codes.view(torch.float8_e4m3fn).float() * signs * 2.0 ** (torch.arange(rows) % 5)[:, None]


def quantizers(width: int) -> tuple[NormForward, NormBackward]:
    """Kernels that quantize what they are given, and do nothing else."""
    parts = (width, None, False, False, 0.0, None)
    return NormForward(*parts, False, True, True), NormBackward(*parts, True, True)


def check_quantizers(package: Package, width: int) -> None:
    spec, backward = quantizers(width)
    for rows in ROWS:
        x = exact_rows(rows, width)
        got, (values, scale, _) = results(package, spec, x), norm_reference.quantize_rows(x)
        assert torch.equal(got["values"].float(), values.float())
        assert torch.equal(got["scale"], scale)
        assert got["scale_max"].shape == (PROGRAMS,)
        assert got["scale_max"].max() == scale.max()
        got = results(package, backward, x)
        assert torch.equal(got["values"].float(), values.float())
        assert near(got["dadd"].sum(0), x.sum(0))


def check_scales(package: Package, specs: Sequence[Norm]) -> None:
    """Scales where the padding of a row, or a row beyond the last, would be larger than all that counts."""
    for spec in specs:
        if not spec.quantize:
            continue
        inputs = random_inputs(5, spec.width, torch.float32)
        low = {name: tensor - 8.0 for name, tensor in inputs.tensors.items()} | {"weight": torch.ones(spec.width)}
        grad = inputs.grad.sign() * torch.rand_like(inputs.grad) + 100.0
        shifted = dataclasses.replace(inputs, tensors=low, grad=grad)
        cancelled = {**low, "x": (inputs.tensors["x"] * 1e-3 - low["add"])}
        if isinstance(spec, NormForward):
            tensors = cancelled if spec.norm is None and spec.add else low
            arguments = [tensors[name] for name in spec.parameters]
        else:
            arguments = arguments_of(spec, shifted)
        got, expected = results(package, spec, *arguments), package.run(spec, *arguments)
        assert torch.equal(got["scale"], expected["scale"]), spec
        assert got["scale_max"].max() == expected["scale_max"].max(), spec


def check_tanh(package: Package) -> None:
    """Each element to its own precision: near zero, where 1 - e has few digits, and where 1 - tanh**2 has none."""
    sizes = torch.logspace(-30, 1.6, 24, dtype=torch.float64)
    x = torch.stack([sizes, -sizes]).float()
    expected = x.double().tanh(), x.double().cosh() ** -2.0
    for spec, given, wanted in zip(STEEP, ([x], [torch.ones_like(x), x]), expected, strict=True):
        (got,) = results(package, spec, *given).values()
        assert torch.allclose(got.double(), wanted, rtol=1e-6, atol=0.0), (got, wanted)


def check_ends(package: Package) -> None:
    """Infinities, NaN and zero, as the reference has them."""
    ends = torch.tensor([[torch.inf, -torch.inf, torch.nan, *[-0.0] * 21]])
    for spec, given in zip((*STEEP, *LEAKY), ([ends], [torch.ones_like(ends), ends]) * 2, strict=True):
        (got,) = results(package, spec, *given).values()
        (wanted,) = package.run(spec, *given).values()
        assert torch.allclose(got, wanted, rtol=1e-6, atol=0.0, equal_nan=True), got


def in_parts(values: Tensor, scale: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A quantized matrix and the largest of its scales in parts, all but the last of them zero."""
    largest = torch.zeros(parts)
    largest[-1] = scale.max()
    return values, scale, largest


def check_requantize_transpose_and_reduce(package: Package) -> None:
    # Ratios of scales of 1 to 2**-4 keep values of 1 and above normal numbers, so that nothing is rounded.
    operands = [
        norm_reference.quantize_rows(exact_rows(rows, columns)) for rows, columns in ((17, 300), (1, 13), (130, 24))
    ]
    sizes = (3, 1, 1030)  # parts: fewer than are read at a step, and more
    for count in (1, 2, 3):
        split = [in_parts(*operand[:2], parts) for operand, parts in zip(operands[:count], sizes, strict=False)]
        arguments: list[object] = [tensor for operand in split for tensor in operand]
        got = list(results(package, RequantizeTranspose(count), *arguments).values())
        for index, (values, scale, _) in enumerate(operands[:count]):
            expected = requantize_transpose(Quantized(values, scale), check=True)
            columns = len(values) + (-len(values) % 16 if count > 1 and index < 2 else 0)  # zeros behind
            assert got[2 * index].shape == (values.shape[1], columns)
            assert torch.equal(got[2 * index][:, : len(values)].float(), expected.values.float())
            assert not got[2 * index][:, len(values) :].float().any()
            assert torch.equal(got[2 * index + 1], expected.scale)
    partials = [torch.randn(rows, columns) for rows, columns in ((1, 1), (600, 24), (513, 13))]
    for count in (1, 2, 3):
        arguments = [item for partial in partials[:count] for item in (partial, torch.float32)]
        for total, partial in zip(results(package, Reduce(count), *arguments).values(), partials, strict=False):
            assert near(total, partial.sum(0))


def check_without_rows(package: Package) -> None:
    """Without rows, sums are zero and every scale that is written is a zero row's."""
    inputs = random_inputs(0, 24, torch.float32)
    for spec in norm_specs(24, PARTS):
        arguments = arguments_of(spec, inputs)
        for name, result in results(package, spec, *arguments).items():
            assert result.abs().float().sum() == 0.0, (spec, name)
    got = results(package, RequantizeTranspose(1), *norm_reference.quantize_rows(torch.zeros(0, 24)))
    assert got["transposed"].shape == (24, 0)
    assert got["scale_t"].flatten().tolist() == [2.0**-108] * 24


def main(folder: Path) -> int:
    """All checks; returns how many results of norms were compared."""
    specs = chosen(spec for width in WIDTHS for spec in norm_specs(width, parts_of(width)))
    bare = [spec for width in WIDTHS for spec in quantizers(width)]
    without = norm_specs(24, PARTS)
    package = write_package(
        folder / "interpreted",
        dict.fromkeys(
            [*specs, *bare, *without, *STEEP, *LEAKY, *map(RequantizeTranspose, (1, 2, 3)), *map(Reduce, (1, 2, 3))]
        ),
    )
    compared = check_norms(package, specs)
    check_scales(package, specs)
    for width in WIDTHS:
        check_quantizers(package, width)
    check_requantize_transpose_and_reduce(package)
    check_without_rows(package)
    check_tanh(package)
    check_ends(package)
    return compared
