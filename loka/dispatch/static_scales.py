"""Static scales of a bound module: buffers of the scales and of their overflow statistics.

An operand with a static scale (`range: static`) is quantized in one pass. Larger values saturate and are counted by the
kernel that writes the operand, on the device and without synchronisation, in eager, compiled and captured models.
Neither buffer is in the state_dict.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# DistributedDataParallel ignores the buffers named in this attribute of the wrapped model.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True, slots=True)
class StaticScale:
    """An operand with a static scale, of one site of a generated class."""

    site: int  # its number in the module's `CallCounters`
    operand: str  # "input" or "grad_output"
    amax: float  # the maximum given when the package was generated
    scale: float  # of all elements

    @property
    def buffers(self) -> tuple[str, str]:
        """Names of the module's buffers: the scale (1, 1), float32, and the overflow statistics (2,), int64."""
        return f"loka_{self.operand}_scale_{self.site}", f"loka_{self.operand}_record_{self.site}"


@dataclass(frozen=True, slots=True)
class Overflow:
    """Elements of a site's operand beyond its static scale; they were saturated."""

    site: str
    operand: str
    elements: int  # number above the format's largest value at that scale
    largest: float  # largest magnitude of the finite elements
    amax: float  # of the static scale

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.operand}: {self.elements} elements saturated; the largest magnitude was "
            f"{self.largest:g}, known was amax {self.amax:g}"
        )


def set_static_scales(
    module: nn.Module, scales: Sequence[StaticScale], records: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Set a module's static scales, on its parameters' device, and overflow statistics: from `records`, or zero."""
    kept = {} if records is None else {name: record for name, record in records.items() if not record.is_meta}
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad():
        for known in scales:
            scale, record = known.buffers
            module.register_buffer(
                scale, torch.full((1, 1), known.scale, dtype=torch.float32, device=device), persistent=False
            )
            counts = kept[record].to(device) if record in kept else torch.zeros(2, dtype=torch.int64, device=device)
            module.register_buffer(record, counts, persistent=False)


def drop_static_scales(module: nn.Module, scales: Sequence[StaticScale]) -> dict[str, torch.Tensor]:
    """Remove the buffers of `set_static_scales`; returns the overflow statistics."""
    records = {}
    for known in scales:
        for name in known.buffers:
            buffer = module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            if buffer is not None and name == known.buffers[1]:
                records[name] = buffer
    return records


def renew_overflow_stats(module: nn.Module, scales: Sequence[StaticScale]) -> None:
    """Give a copy of a module its own overflow statistics, starting at zero; the original keeps its own."""
    module._buffers = dict(module._buffers)
    for known in scales:
        name = known.buffers[1]
        module._buffers[name] = torch.zeros_like(module.get_buffer(name))


def names_in(owner: str, scales: Sequence[StaticScale]) -> list[str]:
    """Qualified names of the buffers of the module `owner`."""
    return [f"{owner}.{name}" if owner else name for known in scales for name in known.buffers]


def keep_from_ddp(root: nn.Module, names: Sequence[str]) -> None:
    """Exclude buffers from DistributedDataParallel, which would overwrite the statistics of all ranks by rank 0's."""
    if names:
        setattr(root, _IGNORED, [*getattr(root, _IGNORED, ()), *names])


def give_back_to_ddp(root: nn.Module, names: Sequence[str]) -> None:
    """Undo `keep_from_ddp`."""
    if not names or _IGNORED not in vars(root):
        return
    others = [name for name in getattr(root, _IGNORED) if name not in names]
    if others:
        setattr(root, _IGNORED, others)
    else:
        delattr(root, _IGNORED)


def clear_overflow_stats(module: nn.Module, scales: Sequence[StaticScale]) -> None:
    """Reset overflow statistics, in place because CUDA graphs write to them."""
    for known in scales:
        module.get_buffer(known.buffers[1]).zero_()


def overflows(module: nn.Module, scales: Sequence[StaticScale], sites: Sequence[str]) -> Iterator[Overflow]:
    """The operands of a module with overflows; waits for the device."""
    for known in scales:
        elements, bits = module.get_buffer(known.buffers[1]).tolist()
        if elements:
            (largest,) = struct.unpack("f", struct.pack("i", bits))
            yield Overflow(sites[known.site], known.operand, elements, largest, known.amax)
