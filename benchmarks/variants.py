"""The variants of a comparison: the unchanged model, other libraries, and generated packages."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from benchmarks.roofline import GemmMath
from loka.bench.peers import torchao_inference, torchao_training
from loka.dispatch import Patch
from loka.dispatch.bind.bind_warnings import fp8_not_expected


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of running a model. At most one of `torchao` and `defaults` is set; with neither it is unchanged."""

    name: str
    precision: GemmMath  # of the GEMMs that it changes; the others stay BF16
    torchao: str = ""  # training recipe; inference uses the configuration of the same granularity
    defaults: str = ""  # defaults of the package's policy, in YAML
    known: bool = False  # that policy has static scales, from a profile learned on the benchmark's own work

    @property
    def generated(self) -> bool:
        """True for a generated package."""
        return bool(self.defaults)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return torch.float32 if self.precision is GemmMath.TF32 else torch.bfloat16


FP8_DEFAULTS = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
BASELINE = "bf16"  # ratios are over this variant
SHOWN = "loka-fp8"  # its bound is printed beside the times

_KNOWN = (
    "compute: fp8, scaling: tensorwise, power_of_two: true, fuse: always, "
    "fprop: {input: {range: static}}, dgrad: {grad_output: {range: static}}, wgrad: {range: static}"
)

VARIANTS = (
    Variant("tf32", GemmMath.TF32),
    Variant(BASELINE, GemmMath.BF16),
    Variant("torchao-tensorwise", GemmMath.FP8_FAST, torchao="tensorwise"),
    Variant("torchao-rowwise", GemmMath.FP8_FAST, torchao="rowwise"),
    Variant("loka-bf16", GemmMath.BF16, defaults="{compute: keep, fuse: always}"),
    Variant(SHOWN, GemmMath.FP8, defaults=f"{{{FP8_DEFAULTS}}}"),
    Variant("loka-fp8-fast", GemmMath.FP8_FAST, defaults=f"{{{FP8_DEFAULTS}, accumulation: fast}}"),
    Variant("loka-fp8-known", GemmMath.FP8, defaults=f"{{{_KNOWN}}}", known=True),
    Variant("loka-fp8-known-fast", GemmMath.FP8_FAST, defaults=f"{{{_KNOWN}, accumulation: fast}}", known=True),
)
NAMES = tuple(variant.name for variant in VARIANTS)


@dataclass(frozen=True, slots=True)
class Ready:
    """A model prepared as a variant, not compiled yet. `patch`: of the generated package, for `verify`."""

    model: nn.Module
    patch: Patch | None

    def verify(self, training: bool) -> None:
        """Raise VerifyError unless every planned FP8 GEMM ran."""
        if self.patch is not None:
            with fp8_not_expected():
                self.patch.verify(backward=training)


def prepare(variant: Variant, model: nn.Module, training: bool, package: ModuleType | None) -> Ready:
    """Turn `model` into the variant, in place: weights are quantized in each training step, frozen in inference.

    `package` is the variant's generated package or None. Raises PeerMissingError if a library is not installed; errors
    of a library propagate.
    """
    model = model.to(variant.dtype).train(training)
    if package is not None:
        with fp8_not_expected():
            patch: Patch = package.apply(model, mode="train" if training else "infer")
        return Ready(model, patch)
    if variant.torchao:
        model = torchao_training(model, variant.torchao) if training else torchao_inference(model, variant.torchao)
    return Ready(model, None)
