"""The generated package of a policy, loaded from generated/NAME under the current directory."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from loka.cli.output import note
from loka.errors import CheckFailedError, InputError

if TYPE_CHECKING:
    from torch import nn

    from loka.dispatch import Patch
    from loka.plan.plan import Plan

ROOT = Path("generated")


def default_folder(name: str) -> Path:
    """Where a policy's package goes unless the user says otherwise, relative to the current directory."""
    return ROOT / name


def fresh_package(plan: Plan, policy: str) -> ModuleType:
    """The generated package of a plan, imported.

    Raises CheckFailedError where it is missing, or is not what `loka generate` would write now.
    """
    from loka.codegen import check_package, render_package

    folder = default_folder(plan.name)
    differences = check_package(render_package(plan), folder)
    if differences:
        state = "is not generated yet" if not folder.is_dir() else "is not what the policy says now"
        details = "".join(f"\n  {difference}" for difference in differences) if folder.is_dir() else ""
        raise CheckFailedError(f"{folder} {state}; run: loka generate {policy}{details}")
    return load_package(plan.name)


def verify(patch: object) -> None:
    """Check that every planned FP8 GEMM of a trained model did run. Raises VerifyError (exit status 1)."""
    from loka.dispatch import Patch

    if not isinstance(patch, Patch):
        raise TypeError(f"a {type(patch).__name__} is no patch")
    patch.verify()


def load_package(name: str) -> ModuleType:
    """Import generated/NAME, from its files, whatever was imported under that name before.

    Raises InputError where it is not there.
    """
    folder = default_folder(name).resolve()
    full = f"{ROOT.name}.{name}"
    for known in [module for module in sys.modules if module == full or module.startswith(full + ".")]:
        del sys.modules[known]
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location(
        full, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise InputError(f"{default_folder(name)}: there is no generated package; run: loka generate")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(full, None)
        raise
    return module


def patcher(package: ModuleType) -> Callable[[nn.Module], Patch]:
    """The package's `apply`, with what it warns of said once on stderr."""
    said: set[str] = set()

    def patch(model: nn.Module) -> Patch:
        from loka.dispatch import LokaWarning

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched: Patch = package.apply(model)
        for warning in caught:
            if not issubclass(warning.category, LokaWarning):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            elif str(warning.message) not in said:
                said.add(str(warning.message))
                note(f"note: {warning.message}")
        return patched

    return patch
