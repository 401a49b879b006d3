"""`loka.generate`: write the package of a policy, or check an existing one."""

from __future__ import annotations

import keyword
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loka.codegen.package_folder import file_hash, recorded_outputs, write_package
from loka.codegen.package_text import MANIFEST, render_package, text_hash
from loka.errors import CheckFailedError, Code, InputError
from loka.paths import path_argument
from loka.plan.evidence import OutdatedProfileError
from loka.plan.plan import Plan
from loka.plan.planner import planned
from loka.policy.policy import Policy


class DifferenceKind(StrEnum):
    """Kind of difference of a file."""

    MISSING = "missing"  # it would be generated, but does not exist
    STALE = "stale"  # unchanged since it was generated, but would be different or absent now
    EDITED = "edited"  # changed since it was generated
    FOREIGN = "foreign"  # not written by LoKA


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that differs from what would be generated, with advice."""

    name: str
    kind: DifferenceKind
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}: {self.advice}"


_ADVICE = {
    DifferenceKind.MISSING: "run loka generate",
    DifferenceKind.STALE: "the policy, its profile, measurements, the model or LoKA changed since: run loka generate",
    DifferenceKind.EDITED: "change the policy instead, and run loka generate --force",
    DifferenceKind.FOREIGN: "LoKA did not write it: move it out of the generated package",
}


def check_package(files: Mapping[str, str], folder: Path) -> tuple[Difference, ...]:
    """Compare a rendered package with a folder; () if it is fresh. Hidden files and `__pycache__` are ignored.

    Raises InputError if the folder cannot be read.
    """
    try:
        recorded = recorded_outputs(folder)
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        found = {name: _kind(name, files, folder, recorded) for name in sorted({*files, *recorded, *present})}
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: cannot be read: {error.strerror or error}; remove it, or give it back its "
            "permissions, and run loka generate again"
        ) from error
    return tuple(Difference(name, kind, _ADVICE[kind]) for name, kind in found.items() if kind is not None)


def _kind(
    name: str, files: Mapping[str, str], folder: Path, recorded: Mapping[str, frozenset[str]]
) -> DifferenceKind | None:
    path = folder / name
    if name not in files and (name.startswith(".") or name == "__pycache__"):
        return None
    if name not in files and name not in recorded:
        return DifferenceKind.FOREIGN
    digest = file_hash(path)
    if digest is None:
        return DifferenceKind.MISSING if name in files else None
    if name in files and digest == text_hash(files[name]):
        return None
    # The manifest does not list itself: a readable one that differs is from an older generation.
    if name == MANIFEST:
        return DifferenceKind.STALE if recorded else DifferenceKind.EDITED
    return DifferenceKind.STALE if digest in recorded.get(name, ()) else DifferenceKind.EDITED


ROOT = Path("generated")


@dataclass(frozen=True, slots=True)
class GeneratedPackage:
    """A package in its folder, up to date with its policy. `written`, `removed`: names of files in it."""

    plan: Plan
    folder: Path
    written: tuple[str, ...] = ()  # by this call; () if nothing had changed
    removed: tuple[str, ...] = ()


def default_folder(name: str) -> Path:
    """Default folder of a package, relative to the current directory."""
    return ROOT / name


def generate(
    policy: str | os.PathLike[str] | Policy,
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    check: bool = False,
) -> GeneratedPackage:
    """Plan a policy's model and write its package: what `loka generate` does.

        generated = loka.generate("policies/ranker.yaml")
        generated.folder  # generated/ranker
        generated.plan.share_fp8  # 0.953

    The output is deterministic to the byte. The files are replaced together: a killed run leaves the old package, the
    new one, or one that refuses to be imported. Needs no GPU.

    Args:
        policy: the policy: a YAML file, or the result of `load_policy`. Its model is built and run on fake tensors.
        out: folder of the package, created if missing; None: generated/NAME under the current directory.
        force: overwrite files that were edited since they were generated.
        check: write nothing; raise if the folder differs from what would be written.

    Raises:
        InputError: the policy, its model, its profile or its measurements are wrong (PolicyError for the policy's text,
            with `file:line:column`); a file was edited and `force` is not given; the folder cannot be written; both
            `force` and `check`.
        CheckFailedError: with `check`, if a file is missing, stale, edited or not LoKA's, a line for each; or if the
            model has changed since it was profiled.
    """
    for name, value in (("force", force), ("check", check)):
        if not isinstance(value, bool):
            raise InputError(f"generate: {name} must be True or False, not {value!r}")
    if check and force:
        raise InputError("generate: check writes nothing, so that there is nothing to force; leave one of the two out")
    if out is not None:
        _check_out(out)
    try:
        plan = planned(policy).plan
    except OutdatedProfileError as error:
        if check:  # the model changed, and so would the package
            raise CheckFailedError(str(error), error.code) from error
        raise
    files = render_package(plan)
    folder = default_folder(plan.name) if out is None else Path(out)
    if not check:
        written = write_package(files, folder, force)
        return GeneratedPackage(plan, folder, written.written, written.removed)
    differences = check_package(files, folder)
    if differences:
        raise CheckFailedError("\n".join(f"{folder}/{difference}" for difference in differences), Code.STALE)
    return GeneratedPackage(plan, folder)


def _check_out(out: str | os.PathLike[str]) -> None:
    """Raise InputError for a folder that Python cannot import a package from."""
    if not path_argument(out, "out", "the path of a folder").strip():
        raise InputError("out is empty; name a folder, or leave it out for generated/NAME")
    if os.path.abspath(out) == os.path.dirname(os.path.abspath(out)):
        raise InputError(f"--out: {out}: a package cannot be imported from there; name a folder in it")
    name = os.path.basename(os.path.abspath(out))
    if keyword.iskeyword(name):
        raise InputError(f"--out: {out}: Python cannot import a package of that name, a keyword; name another folder")
    if "." in name:
        raise InputError(f"--out: {out}: Python cannot import a package with a dot in its name; name another folder")
