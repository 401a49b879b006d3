"""Preparation of a model as a variant: torchao's conversions and generated packages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn

from loka.bench.subjects.variants import Precision, Variant
from loka.dispatch.bind.bind_warnings import fp8_not_expected
from loka.errors import InputError

if TYPE_CHECKING:
    from loka.dispatch import Patch

LEAST_K = 512  # least in_features for torchao's FP8; below, it is slower than BF16
ALIGNMENT = 16  # of in_features and out_features: required by Hopper's FP8 GEMMs


class PeerMissingError(InputError):
    """A library of the comparison is not installed."""


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


def dtype_of(variant: Variant) -> torch.dtype:
    """Dtype of parameters and activations."""
    return torch.float32 if variant.precision is Precision.TF32 else torch.bfloat16


def is_wide(module: nn.Module) -> bool:
    """True if torchao is to run this module, a linear, in FP8."""
    if not isinstance(module, nn.Linear):
        return False
    return takes_fp8(module.in_features, module.out_features)


def takes_fp8(k: int, n: int) -> bool:
    """True if torchao is to run linears of these sizes in FP8."""
    return k % ALIGNMENT == 0 and n % ALIGNMENT == 0 and k >= LEAST_K


def prepare(variant: Variant, model: nn.Module, training: bool, package: ModuleType | None) -> Ready:
    """Turn `model` into the variant, in place: weights are quantized in each training step, frozen in inference.

    `package` is the variant's generated package or None. Raises PeerMissingError if a library is not installed; errors
    of a library propagate.
    """
    model = model.to(dtype_of(variant)).train(training)
    if package is not None:
        with fp8_not_expected():
            patch: Patch = package.apply(model, mode="train" if training else "infer")
        return Ready(model, patch)
    if variant.torchao:
        model = torchao_training(model, variant.torchao) if training else torchao_inference(model, variant.torchao)
    return Ready(model, None)


def torchao_training(model: nn.Module, recipe: str) -> nn.Module:
    """The model with torchao's training recipe in its wide linears. Raises PeerMissingError without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PeerMissingError(f"torchao is not installed ({error}); pip install 'loka[torchao]'") from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: is_wide(module)
    )
    return converted


def torchao_inference(model: nn.Module, granularity: str) -> nn.Module:
    """The model, in bfloat16, with torchao's dynamic FP8 in its wide linears, "tensorwise" or "rowwise".

    Raises PeerMissingError without torchao.
    """
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_
    except ImportError as error:
        raise PeerMissingError(f"torchao is not installed ({error}); pip install 'loka[torchao]'") from error
    grain = PerRow() if granularity == "rowwise" else PerTensor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation notes
        config = Float8DynamicActivationFloat8WeightConfig(granularity=grain)
        quantize_(model, config, filter_fn=lambda module, name: is_wide(module))
    return model
