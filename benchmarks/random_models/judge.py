"""Binds a random model to a package of its own, and compares it with itself unbound.

FP8 that rounds would hide what is wrong by less than its error. So FP8 rounds nothing here: its values are kept in
float32 while a model runs (`exact_fp8`), and what is left is the order of sums.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn

import loka
from benchmarks.random_models.comparison import Case, Dtypes, Noise, Nudge, Outcome, cases, deviations, difference, run
from benchmarks.random_models.generator import RandomModel
from loka.errors import LokaError
from loka.numerics import quantize

POLICY = """\
version: 1
name: {name}
model: {{factory: "{module}:build", batch_size: 64}}
target: reference
defaults: {defaults}
mods: [{{use: fuse_interaction, optional: true}}]
rules: [{{match: "*.r", compute: keep, optional: true}}, {{match: "r*", compute: keep, optional: true}}]
"""
POLICIES = {
    "fp8": "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}",
    "keep": "{compute: keep, fuse: always}",
}
MODULE = "random_model_"
KEPT = 8  # of every so many seeds, one is judged without FP8
NUDGES = 4  # runs of an unbound model with all values off by rounding
REPEATS = 2  # with other inputs, of a model with another gradient: a ReLU at its corner may turn by rounding, once
AFTER_CHANGE = 3  # one of so many cases is run again after a change


class Verdict(StrEnum):
    """What became of a model."""

    INVALID = "invalid"  # the unbound model does not run: a fault of the generator
    REFUSED = "refused"  # nothing is bound, or a LokaError
    EQUAL = "equal"
    VERIFY = "verify"  # another result or an exception after a change, which `Patch.verify` names
    TRACEBACK = "traceback"  # an exception that is no LokaError, while the unbound model runs
    SILENT = "silent"  # another result


FAILURES = (Verdict.TRACEBACK, Verdict.SILENT)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict on a model, its reason, and the modules that were bound."""

    verdict: Verdict
    reason: str = ""
    modules: tuple[str, ...] = ()
    seconds: float = 0.0


class NamedByVerifyError(Exception):
    """What `Patch.verify` says of a model that was changed after `apply`."""


class Workplace:
    """A folder on sys.path, where modules of models and their packages are written, each under a name of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __enter__(self) -> Self:
        sys.path.insert(0, str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.folder))
        for name in [name for name in sys.modules if name.startswith(MODULE)]:
            del sys.modules[name]

    def judge(self, model: RandomModel) -> Judgement:
        """Judge a model under the policy of its seed."""
        start = time.perf_counter()
        name = self.write(model)
        why = self._invalid(name, model.seed)
        if why:
            return Judgement(Verdict.INVALID, why)
        policy = "keep" if model.seed % KEPT == KEPT - 1 else "fp8"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judged = self._judge(name, policy, model)
        reason = f"{policy}: {judged.reason}" if judged.reason else ""
        return replace(judged, reason=reason, seconds=time.perf_counter() - start)

    def write(self, model: RandomModel) -> str:
        """Write the module of a model; returns its name."""
        self.count += 1
        name = f"{MODULE}{model.seed}_{self.count}"
        (self.folder / f"{name}.py").write_text(model.source(), encoding="utf-8")
        importlib.invalidate_caches()
        return name

    def module(self, name: str) -> ModuleType:
        """Import the module of that name, as a new process would."""
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    def package(self, name: str) -> Any:
        """Import the package of that name."""
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def _invalid(self, name: str, seed: int) -> str | None:
        module = self.module(name)
        outcome = run(module.build(), module, Case(64, "training", False, True, 1.0, seed))
        return f"{type(outcome.raised).__name__}: {outcome.raised}" if outcome.raised is not None else None

    def _judge(self, name: str, policy: str, model: RandomModel) -> Judgement:
        package_name = f"{name}_{policy}"
        path = self.folder / f"{package_name}.yaml"
        text = POLICY.format(name=package_name, module=name, defaults=POLICIES[policy])
        path.write_text(text, encoding="utf-8")
        modules: tuple[str, ...] = ()
        try:
            self.module(name)
            plan = loka.generate(path, self.folder / package_name).plan
            modules = tuple(each for binding in plan.bindings for each in binding.modules)
            if not modules:
                notes = [site.region_note or site.gemms[0].reason for site in plan.sites]
                return Judgement(Verdict.REFUSED, "; ".join(dict.fromkeys(map(str, notes))) or "no site")
            package = self.package(package_name)
            for repeat in range(REPEATS + 1):
                words = self._difference(name, package, model, model.seed + 1000 * repeat)
                if words is None:
                    return Judgement(Verdict.EQUAL, modules=modules)
                if "another gradient" not in words:
                    break
            return Judgement(Verdict.SILENT, words or "", modules)
        except NamedByVerifyError as error:
            return Judgement(Verdict.VERIFY, str(error), modules)
        except LokaError as error:
            return Judgement(Verdict.REFUSED, str(error), modules)
        except Exception as error:  # noqa: BLE001 - that is what a traceback is
            return Judgement(Verdict.TRACEBACK, _place(error), modules)

    def _difference(self, name: str, package: Any, model: RandomModel, seed: int) -> str | None:
        """What differs: as it was planned and then changed, or changed before it is bound."""
        drawn = cases(seed)
        words = self._compared(name, package, drawn, [])
        if words or not model.changes:
            return words
        changed = drawn[::AFTER_CHANGE]  # of another model, which has kept nothing of calls under autocast
        words = self._compared(name, package, drawn[:1], changed)
        if words:
            return words
        try:
            words = self._compared(name, package, [], changed, early=True)
        except LokaError:
            return None  # refused at `apply`
        return f"changed before `apply`, {words}" if words else None

    def _compared(
        self, name: str, package: Any, before: Sequence[Case], after: Sequence[Case], early: bool = False
    ) -> str | None:
        """The first difference that is no rounding, in words; the model changes after `before`, or before `apply`.

        Raises NamedByVerifyError where `verify` says so after the change.
        """
        module, own = self._built(name)
        bound_module, bound = self._built(name)  # imported again, so that neither sees the other's globals
        drawn, suspects = [*before, *after], dict[int, tuple[Outcome, Outcome]]()
        try:
            if early:
                module.change(own)
                bound_module.change(bound)
            patch = package.apply(bound)
            for place, case in enumerate(drawn):
                if place == len(before) and not early:
                    if suspects:
                        break
                    module.change(own)
                    bound_module.change(bound)
                first = run(own, module, case)
                try:
                    with exact_fp8():
                        second = run(bound, bound_module, case)
                    differs = difference(first, second, case) is not None
                except LokaError:
                    raise
                except Exception:
                    if place >= len(before) and not early:
                        _verify(patch)
                    raise
                if differs:
                    suspects[place] = first, second
                    if place >= len(before) and not early:
                        _verify(patch)
        finally:
            module.restore()
        noise = self._noise(name, before, after, early, {place: first for place, (first, _) in suspects.items()})
        for place, (first, second) in suspects.items():
            words = difference(first, second, drawn[place], noise[place])
            if words:
                return f"{'after the change, ' * (place >= len(before) and not early)}{drawn[place]}: {words}"
        return None

    def _noise(
        self, name: str, before: Sequence[Case], after: Sequence[Case], early: bool, suspects: dict[int, Outcome]
    ) -> dict[int, Noise]:
        """The noise of the unbound model in some cases, from those on that it starts with."""
        if not suspects:
            return {}
        dtype = self._narrowest(name)
        offs: dict[int, dict[tuple[str, str], float]] = {place: {} for place in suspects}
        for draw in range(NUDGES):
            nudge = Nudge(torch.Generator().manual_seed(draw), dtype)
            module, model = self._built(name)
            try:
                if early:
                    module.change(model)
                for parameter in model.parameters():
                    parameter.data.copy_(nudge.of(parameter))
                for place, case in enumerate([*before, *after][: max(suspects) + 1]):
                    if place == len(before) and not early:
                        module.change(model)
                    outcome = run(model, module, case, replace(nudge, dtype=torch.bfloat16) if case.autocast else nudge)
                    if place in suspects:
                        known = offs[place]
                        for key, off in deviations(suspects[place], outcome).items():
                            known[key] = max(off, known.get(key, 0.0))
            finally:
                module.restore()
        return {place: Noise(dtype, of_case) for place, of_case in offs.items()}

    def _narrowest(self, name: str) -> torch.dtype:
        """The dtype that a model itself rounds to."""
        module, model = self._built(name)
        with Dtypes() as dtypes:
            run(model, module, Case(7, "training", False, True, 1.0, 0))
        return torch.bfloat16 if torch.bfloat16 in dtypes.seen else torch.float32

    def _built(self, name: str) -> tuple[ModuleType, nn.Module]:
        module = self.module(name)
        return module, module.build()


def _verify(patch: Any) -> None:
    try:
        patch.verify(backward=False)
    except LokaError as error:
        raise NamedByVerifyError(str(error)) from error


@contextmanager
def exact_fp8() -> Iterator[None]:
    """FP8 values are kept in float32: quantizers scale, but round nothing."""
    to, view = Tensor.to, Tensor.view
    formats = {info.dtype for info in quantize.FORMATS.values()}

    def exact_to(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        taken: list[Any] = [torch.float32 if each in formats else each for each in arguments]
        return to(self, *taken, **options)

    def exact_view(self: Tensor, *arguments: Any) -> Tensor:
        return self if arguments == (torch.uint8,) else view(self, *arguments)  # as bytes, to be padded

    of_float = {torch.float32: next(iter(quantize.FORMATS))}  # what asks for FP8 operands takes these, too
    changes = mock.patch.multiple(Tensor, to=exact_to, view=exact_view)
    with changes, mock.patch.dict(quantize._FORMAT_OF, of_float):
        yield


def _place(error: Exception) -> str:
    """The exception, and the last line of LoKA's that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/loka/" in frame.filename]
    place = f" ({'loka/' + frames[-1].filename.rpartition('/loka/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}: {str(error)[:300]}"
