"""Saves statistics while training continues: copies are queued on the device, a thread waits for them and writes.

On CUDA the copies go to pinned memory on a separate stream, and the thread waits for an event: training neither waits
nor synchronises. One save runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from loka.errors import LokaError
from loka.probe.profile import profile_file
from loka.probe.profile.profile import RecordedStats
from loka.probe.stats.moments import Snapshot
from loka.probe.stats.site_stats import SiteStats
from loka.probe.stats.site_trackers import SiteSnapshot, read

Finish = Callable[[tuple[SiteStats, ...]], RecordedStats]


class Saver:
    """Saves snapshots in the background. `on_error` is called in the thread when a save has failed."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def busy(self) -> bool:
        """True while a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, path: Path, snapshots: tuple[SiteSnapshot, ...], finish: Finish) -> None:
        """Start writing `finish` of the statistics to `path`. Waits for a running save; raises its error."""
        self.wait()
        copies = _Copies(self._streams)
        on_host = tuple(
            replace(site, parts={name: copies.to_host(part) for name, part in site.parts.items()}) for site in snapshots
        )
        copies.queued()
        self._thread = threading.Thread(
            target=self._run, args=(path, on_host, finish, copies), name="loka-probe-save", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is running; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of the last save, once."""
        error, self._error = self._error, None
        if isinstance(error, LokaError):
            raise error
        if error is not None:
            raise LokaError(f"probe: saving the profile failed: {type(error).__name__}: {error}") from error

    def _run(self, path: Path, snapshots: tuple[SiteSnapshot, ...], finish: Finish, copies: _Copies) -> None:
        try:
            copies.wait()
            profile_file.save(path, finish(tuple(read(site) for site in snapshots)))
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to: the training thread raises it
            self._error = error
            self._on_error()


class _Copies:
    """Copies of device tensors to the host. The originals are kept alive until the copies are complete."""

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self._streams = streams
        self._used: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []
        self._kept: list[Tensor] = []

    def to_host(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in host memory, valid once `wait` has returned."""
        return replace(snapshot, tensors={name: self._copy(tensor) for name, tensor in snapshot.tensors.items()})

    def queued(self) -> None:
        """Mark that all copies are queued."""
        for device in self._used:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._streams[device])
            self._events.append(event)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for event in self._events:
            event.synchronize()
        self._kept.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        device = tensor.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if device not in self._used:
            stream.wait_stream(torch.cuda.current_stream(device))
            self._used.add(device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._kept.append(tensor)
        return host
