"""`loka.generate`: write the package of a policy, or check an existing one."""

from __future__ import annotations

import keyword
import os
from dataclasses import dataclass
from pathlib import Path

from loka.codegen.package.check_package import check_package
from loka.codegen.package.render_package import render_package
from loka.codegen.package.write import write_package
from loka.errors import CheckFailedError, InputError
from loka.paths import path_argument
from loka.plan.evidence import OutdatedProfileError
from loka.plan.plan import Plan
from loka.plan.plan_cache import PlanCache
from loka.plan.planner import planned
from loka.policy.policy import Policy

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
    return generate_with(None, policy, out, force=force, check=check)


def generate_with(
    cache: PlanCache | None,
    policy: str | os.PathLike[str] | Policy,
    out: str | os.PathLike[str] | None,
    *,
    force: bool,
    check: bool,
) -> GeneratedPackage:
    """`generate`, from a plan of a cache if it has one. Raises as that does."""
    for name, value in (("force", force), ("check", check)):
        if not isinstance(value, bool):
            raise InputError(f"generate: {name} must be True or False, not {value!r}")
    if check and force:
        raise InputError("generate: check writes nothing, so that there is nothing to force; leave one of the two out")
    if out is not None:
        _check_out(out)
    try:
        plan = planned(policy, cache=cache).plan
    except OutdatedProfileError as error:
        if check:  # the model changed, and so would the package
            raise CheckFailedError(str(error)) from error
        raise
    files = render_package(plan)
    folder = default_folder(plan.name) if out is None else Path(out)
    if not check:
        written = write_package(files, folder, force)
        return GeneratedPackage(plan, folder, written.written, written.removed)
    differences = check_package(files, folder)
    if differences:
        raise CheckFailedError("\n".join(f"{folder}/{difference}" for difference in differences))
    return GeneratedPackage(plan, folder)


def _check_out(out: str | os.PathLike[str]) -> None:
    """Raise InputError for a folder that Python cannot import a package from."""
    if not path_argument(out, "out", "the path of a folder").strip():
        raise InputError("out is empty; name a folder, or leave it out for generated/NAME")
    if "\0" in os.fspath(out):
        raise InputError("--out: the folder's name holds a NUL; name another folder")
    if os.path.abspath(out) == os.path.dirname(os.path.abspath(out)):
        raise InputError(f"--out: {out}: a package cannot be imported from there; name a folder in it")
    name = os.path.basename(os.path.abspath(out))
    if keyword.iskeyword(name):
        raise InputError(f"--out: {out}: Python cannot import a package of that name, a keyword; name another folder")
    if "." in name:
        raise InputError(f"--out: {out}: Python cannot import a package with a dot in its name; name another folder")
