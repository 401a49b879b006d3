"""Checksums of batches: both runs of a pair have to see the same ones, or their difference is not of FP8 alone."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
from torch import Tensor

from loka.bench.quality.training_calls import BATCHES, TrainingCallError
from loka.model.inputs import tensors_in

_WIDTH = 1024  # words of eight bytes that have a weight each
_PIECE = 1 << 26  # bytes at a time: the sum takes twice its input's memory besides


class BatchChecksums:
    """Takes the checksum of each batch of a run; those of the other run of its pair, if given, have to be the same.

    They are computed on the batches' device, and read with the losses, so that no step waits for the host.
    """

    def __init__(self, expected: tuple[int, ...] | None = None, shared_steps: int = 0) -> None:
        self._expected = expected
        self._seen = list(expected[:shared_steps]) if expected is not None else []
        self._unread: list[Tensor] = []
        self._weights: dict[torch.device, Tensor] = {}

    @property
    def seen(self) -> tuple[int, ...]:
        """The checksum of each step that was read."""
        return tuple(self._seen)

    @property
    def digest(self) -> str:
        """One checksum of all of them."""
        return hashlib.sha256(repr(self._seen).encode()).hexdigest()[:16]

    def add(self, batch: Any) -> None:
        """Take the checksum of a batch: of the bytes, the shapes and the order of its tensors."""
        total = torch.zeros((), dtype=torch.int64)
        for tensor in tensors_in(batch):
            values = tensor.detach()
            if tensor.layout is not torch.strided:
                values = values._values() if tensor.is_sparse else values.values()
            for piece in torch.split(values.contiguous().flatten().view(torch.uint8), _PIECE):
                total = 31 * total + self._sum(piece)
            total = 31 * total + zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        self._unread.append(total)

    def read(self) -> None:
        """Move checksums to the host. Raises TrainingCallError at the first that is not the expected one."""
        if not self._unread:
            return
        for found in torch.stack(self._unread).tolist():
            step = len(self._seen)
            if self._expected is not None and self._expected[step : step + 1] != (found,):
                self._refuse(step)
            self._seen.append(found)
        self._unread.clear()

    def end(self) -> None:
        """Read the last ones. Raises TrainingCallError if there are fewer than expected."""
        self.read()
        if self._expected is not None and len(self._seen) < len(self._expected):
            self._refuse(len(self._seen))

    def _refuse(self, done: int) -> None:
        raise TrainingCallError(
            BATCHES,
            f"the two runs of this pair saw different batches, at step {done + 1} first, so that what they "
            "differ by is not FP8 alone: two calls with the same batch size and seed have to give the same batches "
            "(draw from torch.Generator().manual_seed(seed); return a new iterator each time)",
        )

    def _sum(self, data: Tensor) -> Tensor:
        """A weighted sum of bytes, eight at a time, modulo 2^64: other places of the same bytes change it."""
        weights = self._weights.get(data.device)
        if weights is None:
            drawn = torch.Generator().manual_seed(0)
            weights = torch.randint(-(1 << 62), 1 << 62, (_WIDTH,), generator=drawn).to(data.device)
            self._weights[data.device] = weights
        rows = -(-len(data) // (8 * _WIDTH))
        padded = data.new_zeros(rows * 8 * _WIDTH)
        padded[: len(data)] = data
        sums = (padded.view(torch.int64).view(rows, _WIDTH) * weights).sum(1)
        return (sums * (2 * torch.arange(rows, device=data.device) + 1)).sum()
