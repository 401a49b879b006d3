"""Known scales of a bound module: the buffers that hold them, and the record of what they did not hold.

An operand whose maximum is known before the step (`range: static`) is quantised in one pass. What lies beyond
saturates, and is counted by the kernel that writes the operand: in eager, compiled and captured models alike, on the
device, without waiting for it. Both buffers are no part of the state_dict.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# DistributedDataParallel reads names of buffers from this attribute of the model that it wraps, and leaves them alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True, slots=True)
class StaticScale:
    """One operand of one site of a generated class."""

    site: int  # its number in the module's `Tickets`
    operand: str  # "input" or "grad_output"
    amax: float  # the maximum that was known when the package was generated
    scale: float  # of each element

    @property
    def buffers(self) -> tuple[str, str]:
        """The module's buffers: the scale (1, 1) in float32, and the record (2,) in int64."""
        return f"loka_{self.operand}_scale_{self.site}", f"loka_{self.operand}_record_{self.site}"


@dataclass(frozen=True, slots=True)
class Overflow:
    """What one operand of one site had that its known scale does not hold; these elements were saturated."""

    site: str
    operand: str
    elements: int  # above the format's largest value at that scale
    largest: float  # magnitude of all finite elements
    amax: float  # that was known

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.operand}: {self.elements} elements saturated; the largest magnitude was "
            f"{self.largest:g}, known was amax {self.amax:g}"
        )


def set_static_scales(
    module: nn.Module, scales: Sequence[StaticScale], records: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Give a module its scales on its parameters' device, and its records: those of `records`, or new ones."""
    kept = {} if records is None else {name: record for name, record in records.items() if not record.is_meta}
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad():
        for known in scales:
            scale, record = known.buffers
            module.register_buffer(scale, torch.full((1, 1), known.scale, device=device), persistent=False)
            counts = torch.zeros(2, dtype=torch.int64) if record not in kept else kept[record]
            module.register_buffer(record, counts.to(device), persistent=False)


def drop_static_scales(module: nn.Module, scales: Sequence[StaticScale]) -> dict[str, torch.Tensor]:
    """Remove the buffers of `set_static_scales`; returns the records."""
    records = {}
    for known in scales:
        for name in known.buffers:
            buffer = module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            if buffer is not None and name == known.buffers[1]:
                records[name] = buffer
    return records


def renew_overflow_stats(module: nn.Module, scales: Sequence[StaticScale]) -> None:
    """Give a copy of a module records of its own, that start at nothing; those of the original stay."""
    module._buffers = dict(module._buffers)
    for known in scales:
        name = known.buffers[1]
        module._buffers[name] = torch.zeros_like(module.get_buffer(name))


def names_in(owner: str, scales: Sequence[StaticScale]) -> list[str]:
    """The qualified names of the buffers of a module called `owner`."""
    return [f"{owner}.{name}" if owner else name for known in scales for name in known.buffers]


def keep_from_ddp(root: nn.Module, names: Sequence[str]) -> None:
    """Have DistributedDataParallel leave buffers alone: it would put the records of rank 0 over all others'."""
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
    """Start the records anew, in place: CUDA graphs write into them."""
    for known in scales:
        module.get_buffer(known.buffers[1]).zero_()


def overflows(module: nn.Module, scales: Sequence[StaticScale], sites: Sequence[str]) -> Iterator[Overflow]:
    """The operands of a module that had more than their scale holds; waits for the device."""
    for known in scales:
        elements, bits = module.get_buffer(known.buffers[1]).tolist()
        if elements:
            (largest,) = struct.unpack("f", struct.pack("i", bits))
            yield Overflow(sites[known.site], known.operand, elements, largest, known.amax)
