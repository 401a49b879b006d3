"""Conversions of a model by torchao, for its FP8."""

from __future__ import annotations

import warnings

from torch import nn

from loka.errors import InputError

LEAST_K = 512  # least in_features for torchao's FP8; below, it is slower than BF16
ALIGNMENT = 16  # of in_features and out_features: required by Hopper's FP8 GEMMs


class PeerMissingError(InputError):
    """A library of the comparison is not installed."""


def is_wide(module: nn.Module) -> bool:
    """True if torchao is to run this module, a linear, in FP8."""
    if not isinstance(module, nn.Linear):
        return False
    return takes_fp8(module.in_features, module.out_features)


def takes_fp8(k: int, n: int) -> bool:
    """True if torchao is to run linears of these sizes in FP8."""
    return k % ALIGNMENT == 0 and n % ALIGNMENT == 0 and k >= LEAST_K


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
