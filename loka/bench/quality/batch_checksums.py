"""Checksums of batches: both runs of a pair have to see the same ones, or their difference is not of FP8 alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loka.bench.quality.training_calls import BATCHES, TrainingCallError
from loka.model.inputs import tensors_in

_WIDTH = 1024  # words of eight bytes that have a weight each


class BatchChecksums:
    """Takes the checksum of each batch of a run; those of the other run of its pair, if given, have to be the same.

    They are computed on the batches' device, and read with the losses, so that no step waits for the host.
    """

    def __init__(self, expected: Sequence[int] | None = None, shared_steps: int = 0) -> None:
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
            values = tensor
            if tensor.layout is not torch.strided:
                values = tensor._values() if tensor.is_sparse else tensor.values()
            found = self._sum(values.detach())
            total = 31 * total.to(found.device) + found
            for number in (tensor.element_size(), *tensor.shape):
                total = 31 * total + number
        self._unread.append(total)

    def read(self) -> None:
        """Move checksums to the host. Raises TrainingCallError at the first that is not the expected one."""
        for found in self._unread:
            self._seen.append(int(found))
            step = len(self._seen)
            if self._expected is not None and (step > len(self._expected) or self._expected[step - 1] != int(found)):
                raise TrainingCallError(
                    BATCHES,
                    f"the two runs of this pair saw different batches, at step {step} first, so that what they differ "
                    "by is not FP8 alone: two calls with the same batch size and seed have to give the same batches "
                    "(draw from torch.Generator().manual_seed(seed); return a new iterator each time)",
                )
        self._unread.clear()

    def end(self) -> None:
        """Read the last ones. Raises TrainingCallError if there are fewer than expected."""
        self.read()
        if self._expected is not None and len(self._seen) < len(self._expected):
            raise TrainingCallError(
                BATCHES,
                f"the batches of the second run of this pair end after {len(self._seen)} steps, those of the first "
                f"after {len(self._expected)}: two calls with the same batch size and seed have to give the same "
                "batches (return a new iterator each time)",
            )

    def _sum(self, tensor: Tensor) -> Tensor:
        """A weighted sum of a tensor's bytes, eight at a time, modulo 2^64: other places of its elements change it."""
        weights = self._weights.get(tensor.device)
        if weights is None:
            drawn = torch.Generator().manual_seed(0)
            weights = torch.randint(-(1 << 62), 1 << 62, (_WIDTH,), generator=drawn).to(tensor.device)
            self._weights[tensor.device] = weights
        given = tensor.contiguous().flatten().view(torch.uint8)
        rows = -(-len(given) // (8 * _WIDTH))
        padded = given.new_zeros(rows * 8 * _WIDTH)
        padded[: len(given)] = given
        sums = (padded.view(torch.int64).view(rows, _WIDTH) * weights).sum(1)
        return (sums * (2 * torch.arange(rows, device=tensor.device) + 1)).sum()
