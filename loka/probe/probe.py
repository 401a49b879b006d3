"""`loka.Probe`: records the operands of a model's GEMMs in any training loop."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from loka.errors import InputError, LokaError
from loka.graph.sites.discover import find_sites
from loka.model.callables import current_directory_importable
from loka.mods.adaptation import mod_fingerprints
from loka.mods.modded_model import built_model
from loka.mods.policy_loader import policy_argument
from loka.paths import path_argument, shown
from loka.policy.policy import Policy
from loka.probe.capture.live_sites import check_adapted, find_live
from loka.probe.capture.saver import Saver
from loka.probe.capture.watch import RowNumbers, Watch
from loka.probe.profile import profile_file
from loka.probe.profile.profile import Profile, RecordedStats
from loka.probe.profile.summarise import StepFigures, summarise, timestamp
from loka.probe.stats.graph_replay import Replays
from loka.probe.stats.merge import merge_across
from loka.probe.stats.site_stats import SiteStats
from loka.probe.stats.site_trackers import SiteSnapshot, Trackers, read
from loka.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Log = Callable[[int, dict[str, float]], object]


class ProbeWarning(UserWarning):
    """The Probe recorded less than it was asked to."""


class Probe:
    """Records, on one training step in `every`, the operands of each GEMM of a policy's model.

        with loka.Probe(model, "policies/ranker.yaml", path="ranker.full.safetensors") as probe:
            for inputs, target in batches:
                optimizer.zero_grad()
                loss(model(*inputs), target).backward()
                optimizer.step()
                probe.step()  # once, after each optimizer step

    A sampled step runs eagerly under a mode that sees every torch function; nothing is installed in the model, and the
    other steps run unchanged, including compiled graphs. Counted from 0, step i is sampled if i % every == every - 1.
    Evaluation, in eval mode and without gradients, is ignored.

    A CUDA graph that the training loop captured itself replays without Python. Run sampled steps eagerly there:

        if probe.sampling: eager_step()
        else: graph.replay()
        probe.step()

    DDP, FSDP2 (`fully_shard`, with a `group`), torch.compile and activation checkpointing may be around or inside the
    model. FSDP1, scripted and nn.DataParallel models are rejected. For sites patched by a generated package, the
    operands are the dequantized FP8 values.

    Args:
        model: The training model on its device, changed by the policy's mods.
        policy: A policy, or the path of one. Its `model` section is built once more, with its mods, to find the sites.
        every: One step in this number is sampled.
        path: Where to save (the full form, see `loka.probe.profile.profile_file`); None: nothing is saved.
        save_every: Steps between saves; one more save is made at the end, also after Ctrl-C.
        rows: Rows sampled in each call, the same ones for the input and its output gradient. With one step in 100 over
            10,000 steps the default gives 25,600 rows; a short run needs more.
        group: Ranks to merge over. `stats`, `recorded` and the save at the end are then collective, and rank 0 of the
            group writes `path`; until then each rank saves its own file, with `.rankR` in its name; sharded weights
            are in the merged statistics alone.
        log: Called after each sampled step, in `step`, with the number of completed steps and a dict of the
            step's figures by `SITE/OPERAND/FIGURE`, such as "layers.0.up/input/rms": for TensorBoard and the like. Each
            rank gets those of its own rows, and none of sharded weights. Waits for the device.

    Raises:
        InputError: The model does not fit the policy, or cannot be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | str | Path,
        *,
        every: int = 100,
        path: str | Path | None = None,
        save_every: int = 10_000,
        rows: int = 256,
        group: ProcessGroup | None = None,
        log: Log | None = None,
    ) -> None:
        for name, value in (("every", every), ("save_every", save_every), ("rows", rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"probe: {name} must be a whole number of at least 1, not {value!r}")
        if not isinstance(model, nn.Module):
            raise InputError(f"probe: model must be the nn.Module that is trained, not a {type(model).__name__}")
        if path is not None:
            _check_path(path)
        if log is not None and not callable(log):
            raise InputError(f"probe: log must be callable, not a {type(log).__name__}")
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise InputError(f"probe: group must be a ProcessGroup of torch.distributed, not a {type(group).__name__}")
        with current_directory_importable():
            self._policy = policy_argument(policy, "probe: policy")
            built, adapted = built_model(self._policy)
            sites = find_sites(built).sites
        self.unseen_steps = 0  # sampled steps without any operand of a site
        self.samples = 0  # sampled steps with at least one
        check_adapted(model, adapted.adaptations)
        self._mods = mod_fingerprints(adapted.adaptations)
        self._live = find_live(model, sites)
        if group is None and any(live.is_sharded for live in self._live.sites):
            raise InputError(
                "probe: the model is sharded by fully_shard, and its weights are read by all ranks together: give the "
                "Probe of every rank group=torch.distributed.group.WORLD"
            )
        self._every = every
        self._path = None if path is None else Path(path)
        self._save_every = save_every
        self._numbers = RowNumbers(rows)
        self._group = group
        self._log = log
        self._figures = StepFigures()
        self._trackers: dict[str, Trackers] = {}
        self._watch: Watch | None = None
        self._stance: Any = None
        self._saver = Saver(self._wake)
        self._state = "new"  # open, closed
        self._step = 0  # completed steps
        self._last_sampled = 0  # completed steps at the end of the last sampled one
        self._next = 0  # number of completed steps at which there is something to do
        self._warned = False

    @property
    def sampling(self) -> bool:
        """True if the current step is sampled, and so must run in Python."""
        return self._watch is not None and self._watch.active

    def __enter__(self) -> Self:
        if self._state != "new":
            raise InputError(
                f"probe: this Probe {'is' if self._state == 'open' else 'was'} entered already; "
                f"use `with` once for each Probe"
            )
        with torch.device("cpu"):  # whatever the default device is
            self._trackers = {live.site.name: Trackers(live) for live in self._live.sites}
        replays: dict[torch.device, Replays] = {}
        for trackers in self._trackers.values():
            self._numbers.prepare(trackers.device)
            if trackers.device.type == "cuda":
                if trackers.device not in replays:
                    replays[trackers.device] = Replays(trackers.device)
                trackers.capture(self._numbers.rows, replays[trackers.device])
        self._watch = Watch(self._live, self._trackers, self._numbers)
        self._state = "open"
        self._turn()
        return self

    def step(self) -> None:
        """Report a completed training step: call it once after each optimizer step."""
        self._step += 1
        if self._step >= self._next:
            self._turn()

    def save(self) -> None:
        """Save the statistics so far to `path`, in the background.

        Waits for a running save. Errors are raised by the next step, save or the end of `with`. Raises InputError if
        the Probe has no path.
        """
        self._save()

    def stats(self) -> tuple[SiteStats, ...]:
        """The statistics so far of each site, with tensors on the CPU; parts that were never seen are None.

        Synchronises. With a group it is collective, and returns the merged statistics on every rank.
        """
        with torch.device("cpu"):
            stats = tuple(read(site) for site in self._snapshots(together=True))
            return stats if self._group is None else merge_across(stats, self._group)

    def recorded(self) -> RecordedStats:
        """The full profile so far, without estimates and findings. Collective and synchronising like `stats`."""
        ranks = 1 if self._group is None else torch.distributed.get_world_size(self._group)
        with torch.device("cpu"):
            return self._finish(ranks)(self.stats())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(done=False)
        watch, self._state = self._watch, "closed"
        try:
            if kind is None or kind is KeyboardInterrupt:
                self._warn_unseen()
                self._save_last(alone=kind is not None)
            else:
                self._saver.wait()
        except LokaError:
            if kind is None:
                raise
            warnings.warn("probe: the profile could not be saved", ProbeWarning, stacklevel=2)
        finally:
            if watch is not None:
                watch.open = False

    def _wake(self) -> None:
        self._next = 0

    def _turn(self) -> None:
        """Leave a sampled step, save, enter the next sampled step: whatever is due now."""
        if self._state != "open" or self._watch is None:
            raise InputError("probe: step() belongs inside `with Probe(...) as probe:`")
        if self._leave() and self._log is not None:
            self._log(self._step, self._figures.read(self._trackers.values()))
        due = self._path is not None and self._step > 0 and self._step % self._save_every == 0
        if due and not self._saver.busy:
            self._save()
        sampled = self._step + (self._every - 1 - self._step) % self._every
        until_save = self._step + self._save_every - self._step % self._save_every
        self._next = min(sampled if sampled > self._step else self._step + 1, until_save)
        self._saver.raise_error()
        if sampled == self._step:
            self._watch.start()
            if "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")

    def _leave(self, done: bool = True) -> bool:
        """End a sampled step, if one runs; only a completed one counts as unseen. True if operands were seen."""
        watch = self._watch
        if watch is None or not watch.active:
            return False
        watch.stop()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if watch.calls:
            self.samples += 1
            self._last_sampled = self._step
        elif done:
            self.unseen_steps += 1
        return watch.calls > 0

    def _snapshots(self, together: bool) -> tuple[SiteSnapshot, ...]:
        if not self._trackers:
            names = ((live.site.name, live.site.k, live.site.n) for live in self._live.sites)
            return tuple(SiteSnapshot(*name, {}) for name in names)
        for trackers in self._trackers.values():
            trackers.take_weight(self._step, together)
        return tuple(trackers.snapshot() for trackers in self._trackers.values())

    def _save(self) -> None:
        path = self._own_path()
        self._warn_unseen()
        self._saver.start(path, self._snapshots(together=False), self._finish())

    def _save_last(self, alone: bool) -> None:
        """The save at the end: of all ranks together, unless only one was interrupted."""
        together = self._path is not None and self._group is not None and not alone
        if self._path is not None and not together:
            self._save()
        self._saver.wait()
        if self._path is not None and together:
            recorded = self.recorded()
            if torch.distributed.get_rank(self._group) == 0:
                profile_file.save(self._path, recorded)
            self._own_path().unlink(missing_ok=True)

    def _own_path(self) -> Path:
        if self._path is None:
            raise InputError("probe: nowhere to save to: give the Probe a path")
        if self._group is None:
            return self._path
        rank = torch.distributed.get_rank(self._group)
        return self._path.with_name(f"{self._path.stem}.rank{rank}{self._path.suffix}")

    def _finish(self, ranks: int = 1) -> Callable[[tuple[SiteStats, ...]], RecordedStats]:
        """A function that makes the full profile from statistics and the current counts; runs in the saving thread."""
        policy = self._policy
        batch = (policy.train and policy.train.batch_size) or policy.model.batch_size
        rows = {live.site.name: live.site.rows.at(batch) for live in self._live.sites}
        empty = Profile(
            name=policy.name,
            model=policy.model.factory,
            loka_version=__version__,
            created=timestamp(),
            steps=self._last_sampled,
            every=self._every,
            samples=self.samples * ranks,
            batch_size=batch,
            sites=(),
            findings=(),
            mods=self._mods,
        )
        return partial(_recorded, empty, rows)

    def _warn_unseen(self) -> None:
        if self.unseen_steps and not self._warned:
            self._warned = True
            warnings.warn(
                f"probe: in {self.unseen_steps} of {self.unseen_steps + self.samples} sampled steps no site of the "
                f"model was seen: run the model of this Probe between steps, in Python (if probe.sampling: the eager "
                f"step, else: the CUDA graph), in the thread that calls probe.step()",
                ProbeWarning,
                stacklevel=4,
            )


def _recorded(empty: Profile, rows: dict[str, int], stats: tuple[SiteStats, ...]) -> RecordedStats:
    sites = tuple(summarise(site, (), _rows_of(site, rows[site.name])) for site in stats)
    return RecordedStats(replace(empty, sites=sites), stats)


def _rows_of(site: SiteStats, expected: int) -> int:
    """M of a call: the average of the calls seen, otherwise that of the policy's batch size."""
    return site.input.rows // site.input.calls if site.input is not None and site.input.calls else expected


def _check_path(path: object) -> None:
    """Raise InputError for a path that no profile can be saved at: the first save may be hours away."""
    text = path_argument(path, "probe: path")
    if not text.strip() or "\0" in text:
        wrong = "holds a NUL" if text.strip() else "is empty"
        raise InputError(f"probe: path {wrong}; name a file, or leave it out to save nothing")
    profile_file.check_replaceable_by_profile(text, "probe: path")
    above = next(folder for folder in Path(os.path.abspath(text)).parents if os.path.lexists(folder))
    if os.path.isdir(text):
        raise InputError(f"probe: path: {shown(text)} is a folder; name a file in it")
    if not above.is_dir():
        raise InputError(f"probe: path: {shown(above)} is no folder; name a file in one")
