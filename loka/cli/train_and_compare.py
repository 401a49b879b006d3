"""What `loka train`, `compare`, `tune` and `probe` share: the training job, the package, the labels of both models."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from loka.cli.output import note
from loka.errors import CheckFailedError, Code, InputError, LokaError

if TYPE_CHECKING:
    from torch import nn

    from loka.bench.quality.training_job import TrainingJob
    from loka.dispatch import Patch
    from loka.plan.plan import Plan
    from loka.policy.policy import Policy

_LOKA = str(Path(__file__).parents[1]) + os.sep

DEVICES = ("auto", "cpu", "cuda")


def make_job(policy: Policy, steps: int | None, device: str, tested: bool = True) -> TrainingJob:
    """The policy's job; `steps` and `device` as on the command line. Without `tested`, train.test may be missing.

    Raises InputError, with the place in the policy, if it has no train section or a callable cannot be found.
    """
    from loka.bench.quality.training_job import job_of

    return job_of(policy, steps, choose_device(device), tested)


@contextmanager
def training_of(policy: Policy) -> Iterator[None]:
    """Context of training with the user's batches, model and loss: their exceptions become InputErrors with a place.

    An exception from LoKA or a generated package, by the innermost frame outside torch, is raised unchanged.
    """
    from loka.bench.quality.training_calls import TrainingCallError, place_in_run
    from loka.model.callables import describe_error, place_of

    try:
        yield
    except TrainingCallError as error:
        raise InputError(f"{policy.where(error.field)}: {error}") from error
    except LokaError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error)
        if not place or place.startswith((_LOKA, os.path.abspath("generated") + os.sep)):
            raise
        where = policy.where("train")
        raised = f"{place_in_run(error)}training raised {describe_error(error)}"
        raise InputError(f"{where}: train: {raised}; correct it there") from error


def choose_device(wanted: str) -> str:
    """The device to train on; `auto` is a GPU if there is one. Raises InputError if the device is not available."""
    import torch

    if wanted not in DEVICES:
        raise InputError(f"--device is {wanted!r}, but must be one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise InputError("--device is cuda, but torch sees no GPU here; leave the option out, or see loka doctor")
    return "cuda" if available and wanted != "cpu" else "cpu"


def fresh_package(plan: Plan, policy: str) -> ModuleType:
    """Import the generated package of a plan.

    Raises CheckFailedError if it is missing or differs from what `loka generate` would write now.
    """
    from loka.codegen import check_package, default_folder, render_package

    folder = default_folder(plan.name)
    differences = check_package(render_package(plan), folder)
    if differences:
        state = "is not generated yet" if not folder.is_dir() else "is not what the policy says now"
        details = "".join(f"\n  {difference}" for difference in differences) if folder.is_dir() else ""
        raise CheckFailedError(f"{folder} {state}; run: loka generate {policy}{details}", Code.STALE)
    return load_package(plan.name)


def verify(patch: object) -> None:
    """Check that every planned FP8 GEMM of a trained model ran. Raises VerifyError (exit status 1)."""
    from loka.dispatch import Patch

    if not isinstance(patch, Patch):
        raise TypeError(f"a {type(patch).__name__} is no patch")
    from loka.dispatch.bind.bind_warnings import fp8_not_expected

    with fp8_not_expected():  # `apply` has said so
        patch.verify()


def load_package(name: str) -> ModuleType:
    """Import generated/NAME of the current directory, replacing an earlier import of that name.

    Raises InputError if another package of that name is found first.
    """
    from loka.codegen import default_folder
    from loka.codegen.generation import ROOT
    from loka.model.callables import current_directory_importable

    folder = default_folder(name).resolve()
    root, full = ROOT.name, f"{ROOT.name}.{name}"
    for known in [module for module in sys.modules if module == root or f"{module}.".startswith(f"{full}.")]:
        del sys.modules[known]
    with current_directory_importable():
        module = importlib.import_module(full)
    found = Path(module.__file__ or "").resolve().parent
    if found != folder:
        raise InputError(
            f"{full} is imported from {found}, not from {folder}: rename that package, or take it off the path"
        )
    return module


def patcher(package: ModuleType, quiet: bool = False) -> Callable[[nn.Module], Patch]:
    """The package's `apply`, with each of LoKA's warnings printed once on stderr, or with none of them if `quiet`."""
    shown: set[str] = set()

    def patch(model: nn.Module) -> Patch:
        from loka.dispatch import LokaWarning

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched: Patch = package.apply(model)
        for warning in caught:
            if not issubclass(warning.category, LokaWarning):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            elif not quiet and str(warning.message) not in shown:
                shown.add(str(warning.message))
                note(f"note: {warning.message}")
        return patched

    return patch


AGAINST = ("model", "original")


@dataclass(frozen=True, slots=True)
class ComparisonLabels:
    """Labels of both runs: in columns, in progress, and in sentences."""

    first: str  # in a column
    second: str
    running: str  # of the second, while it trains: "in FP8"
    of: str  # of the first, in a sentence: "the model as it is"
    what: str = "FP8"  # of the second, in a sentence

    @property
    def by_run(self) -> dict[str, str]:
        """The training loop's name of a run -> label."""
        return {"as it is": self.first, "patched": self.running}


AS_IS = ComparisonLabels("as it is", "FP8", "in FP8", "the model as it is")
ADAPTED = ComparisonLabels("with mods", "with mods, FP8", "with mods, in FP8", "the model with its mods")
ORIGINAL = ComparisonLabels("original", "with mods", "with mods", "the original", "the model with its mods")
# Of a package that only fuses or merges.
AS_IS_WITHOUT_FP8 = ComparisonLabels("as it is", "generated", "generated", "the model as it is", "the generated code")
ADAPTED_WITHOUT_FP8 = ComparisonLabels(
    "with mods", "with mods, generated", "with mods, generated", "the model with its mods", "the generated code"
)


def comparison_labels(plan: Plan, against: str = AGAINST[0]) -> ComparisonLabels:
    """The labels of a plan's comparison: FP8 against the same model, or the adapted model against the original.

    Raises InputError for another `against`, and for "original" if no mod of the plan changes modules.
    """
    if against not in AGAINST:
        raise InputError(f"--against is {against!r}, but must be one of {', '.join(AGAINST)}")
    if against == AGAINST[0]:
        if any(site.fp8 for site in plan.sites):
            return ADAPTED if plan.adaptations else AS_IS
        return ADAPTED_WITHOUT_FP8 if plan.adaptations else AS_IS_WITHOUT_FP8
    if not plan.adaptations:
        raise InputError(
            f"--against original: no mod of {plan.name} changes modules of the model, so that it is the original; "
            "leave the option out"
        )
    return ORIGINAL
