"""The generated package of a policy, loaded from generated/NAME under the current directory."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from loka.cli.output import note
from loka.codegen import check_package, default_folder, render_package
from loka.codegen.generation import ROOT
from loka.errors import CheckFailedError, InputError

if TYPE_CHECKING:
    from torch import nn

    from loka.dispatch import Patch
    from loka.plan.plan import Plan


def fresh_package(plan: Plan, policy: str) -> ModuleType:
    """Import the generated package of a plan.

    Raises CheckFailedError if it is missing or differs from what `loka generate` would write now.
    """
    folder = default_folder(plan.name)
    differences = check_package(render_package(plan), folder)
    if differences:
        state = "is not generated yet" if not folder.is_dir() else "is not what the policy says now"
        details = "".join(f"\n  {difference}" for difference in differences) if folder.is_dir() else ""
        raise CheckFailedError(f"{folder} {state}; run: loka generate {policy}{details}")
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
    from loka.sites.callables import current_directory_importable

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
