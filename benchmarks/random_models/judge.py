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
from collections.abc import Iterator
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
from benchmarks.random_models.comparison import Case, cases, difference, run
from benchmarks.random_models.generator import RandomModel
from loka.errors import LokaError
from loka.numerics import quantize

POLICY = """\
version: 1
name: {name}
model: {{factory: "{module}:build", batch_size: 64}}
target: reference
defaults: {defaults}
"""
POLICIES = {
    "fp8": "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}",
    "keep": "{compute: keep, fuse: always}",
}
MODULE = "random_model_"
REPEATS = 2  # with other inputs, of a model with another gradient: a ReLU at its corner may turn by rounding, once
AFTER_CHANGE = 3  # each of so many cases is run after a change


class Verdict(StrEnum):
    """What became of a model; of two policies the later one counts."""

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
        """Judge a model under each policy, up to the first that fails."""
        start, judged = time.perf_counter(), Judgement(Verdict.INVALID)
        name = self.write(model)
        why = self._invalid(name, model.seed)
        if why:
            return replace(judged, reason=why)
        order = list(Verdict)
        for policy in POLICIES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = self._judge(name, policy, model)
            if order.index(other.verdict) > order.index(judged.verdict):
                judged = replace(other, reason=f"{policy}: {other.reason}" if other.reason else "")
            if judged.verdict in FAILURES:
                break
        return replace(judged, seconds=time.perf_counter() - start)

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
        words = self._bound_difference(name, package, drawn, ())
        if words or not model.changes:
            return words
        words = self._bound_difference(name, package, drawn[:1], drawn[::AFTER_CHANGE])
        if words:
            return f"after the change, {words}"
        try:
            words = self._bound_difference(name, package, (), drawn[::AFTER_CHANGE], early=True)
        except LokaError:
            return None  # refused at `apply`
        return f"changed before `apply`, {words}" if words else None

    def _bound_difference(self, name: str, package: Any, before: Any, after: Any, early: bool = False) -> str | None:
        module = self.module(name)
        own = module.build()
        bound_module = self.module(name)  # again, so that neither sees the other's globals
        bound = bound_module.build()
        try:
            if early:
                module.change(own)
                bound_module.change(bound)
            patch = package.apply(bound)
            words = _compared(own, module, bound, bound_module, before)
            if words or not after:
                return words
            if early:
                return _compared(own, module, bound, bound_module, after)
            module.change(own)
            bound_module.change(bound)
            return _changed(own, module, bound, bound_module, after, patch)
        finally:
            module.restore()


def _compared(own: nn.Module, module: ModuleType, bound: nn.Module, bound_module: ModuleType, drawn: Any) -> str | None:
    for case in drawn:
        first = run(own, module, case)
        with exact_fp8():
            second = run(bound, bound_module, case)
        words = difference(first, second, case)
        if words:
            return f"{case}: {words}"
    return None


def _changed(
    own: nn.Module, module: ModuleType, bound: nn.Module, bound_module: ModuleType, drawn: Any, patch: Any
) -> str | None:
    """As `_compared`, of a model that was changed after `apply`. Raises NamedByVerifyError where `verify` says so."""
    try:
        words = _compared(own, module, bound, bound_module, drawn)
    except LokaError:
        raise
    except Exception:
        _verify(patch)
        raise
    if words:
        _verify(patch)
    return words


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
