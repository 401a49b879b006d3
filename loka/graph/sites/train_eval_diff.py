"""Differences between training and evaluation, as far as they can be found without running."""

from __future__ import annotations

from types import CodeType, FunctionType

from torch import nn

_TELLS = frozenset(("training", "is_grad_enabled", "is_inference_mode_enabled"))


def depends_on_mode(modules: dict[str, nn.Module]) -> str | None:
    """The name of the first module, except torch's own, whose class reads the mode; None where none does.

    Only the code of the modules' own classes is read: torch's own dropout and normalisation never add or drop a GEMM.
    """
    reads_mode: dict[type, bool] = {}
    for name, module in modules.items():
        cls = type(module)
        if cls not in reads_mode:
            reads_mode[cls] = any(_asks(base) for base in cls.__mro__ if not base.__module__.startswith("torch."))
        if reads_mode[cls]:
            return name or type(module).__name__
    return None


def _asks(cls: type) -> bool:
    return any(_mentions(value.__code__) for value in vars(cls).values() if isinstance(value, FunctionType))


def _mentions(code: CodeType) -> bool:
    return not _TELLS.isdisjoint(code.co_names) or any(_mentions(c) for c in code.co_consts if isinstance(c, CodeType))


def is_fused(layer: nn.Module) -> bool:
    """True for an nn.TransformerEncoderLayer that runs as one fused kernel in evaluation without gradients.

    Its nn.Linears are then read, not called. The conditions are those of torch's forward that can be checked in
    advance; it also requires a three-dimensional input and no autocast.
    """
    original = nn.TransformerEncoderLayer.forward
    if not isinstance(layer, nn.TransformerEncoderLayer) or type(layer).forward is not original:
        return False
    attention = layer.self_attn
    return bool(
        isinstance(attention, nn.MultiheadAttention)
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
    )
