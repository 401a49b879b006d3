"""Paths of a policy's profiles, and checks that a profile matches the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from loka.errors import InputError
from loka.paths import resolved_path

if TYPE_CHECKING:
    from loka.cli.probe_run import Learned
    from loka.plan.examine import Examined
    from loka.policy.policy import Policy
    from loka.probe.profile.profile import Profile

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Places:
    """The files of a policy's profile, and advice on naming it in the policy."""

    summary: Path
    full: Path
    interrupted: Path
    advice: str | None

    @classmethod
    def of(cls, policy: Policy, out: str | None) -> Places:
        """Paths from `out` if given, else from the policy or its base, else `Policy.default_profile`.

        Raises InputError where `out` names no file.
        """
        folder = policy.path.parent
        named = policy.profile_file
        summary = Path(out) if out is not None else named or folder / policy.default_profile
        if not summary.name:
            raise InputError(f"-o: {out!r} names no file; name one, as in profiles/{policy.name}{SUFFIX}")
        stem = summary.name.removesuffix(SUFFIX)
        relative = Path(os.path.relpath(summary, folder)).as_posix()
        advice = None
        if policy.profile is None:  # the one at the default place is used without being named
            if os.path.abspath(summary) != os.path.abspath(folder / policy.default_profile):
                advice = f"for loka plan to use it, add to {policy.path}: profile: {relative}"
        elif named is not None and os.path.abspath(named) != os.path.abspath(summary):
            place = policy.where("profile")
            advice = f"{place} names {policy.profile}; for this one, in {policy.path}: profile: {relative}"
        return cls(
            summary,
            summary.with_name(f"{stem}.full{SUFFIX}"),
            summary.with_name(f"{stem}.interrupted{SUFFIX}"),
            advice,
        )

    def ignore_full(self) -> None:
        """Write a .gitignore beside the full form, if there is none: it is large, and not to be committed."""
        with suppress(OSError), self.full.with_name(".gitignore").open("x") as file:
            file.write(f"*.full{SUFFIX}\n*.interrupted{SUFFIX}\n")


def check_writable(path: Path) -> None:
    """Raise InputError if `path` cannot be written, before training starts. Creates nothing."""
    if path.is_dir():
        raise InputError(f"-o: {path} is a folder; name a file in it")
    resolved_path(path)
    folder = Path(os.path.abspath(path)).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"-o: {path} cannot be written: {folder} is not a folder; choose another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"-o: {path} cannot be written: no permission in {folder}; choose another place")


def merge_profiles(examined: Examined, files: Sequence[str]) -> Learned:
    """Merge full profiles of the policy's model. Raises InputError for a summary, another model, mods or sites."""
    from loka.cli.probe_run import Learned
    from loka.probe.profile import profile_file
    from loka.probe.profile.profile import Profile
    from loka.probe.profile.summarise import unite

    loaded = []
    for number, path in enumerate(files):
        if any(os.path.exists(path) and os.path.samefile(path, other) for other in files[:number]):
            raise InputError(f"--from: {path} is given twice; its samples would count twice: name it once")
        found = profile_file.load(path)
        if isinstance(found, Profile):
            raise InputError(
                f"{path}: a summary, without the statistics that --from merges; name the full form beside it, "
                f"{Path(path).name.removesuffix(SUFFIX)}.full{SUFFIX}"
            )
        check_fits(examined, found.profile, path, "--from")
        loaded.append(found)
    merged = reduce(unite, loaded)
    return Learned(replace(merged, profile=replace(merged.profile, name=examined.policy.name)), {}, {})


def check_fits(examined: Examined, profile: Profile, path: str, option: str) -> None:
    """Raise InputError if the profile at `path` is of another model, mods or shapes than the policy's.

    `option`: what named it, for messages.
    """
    from loka.plan.evidence import ProfiledSites, check_sites

    policy = examined.policy
    if profile.model != policy.model.factory:
        raise InputError(
            f"{path}: a profile of {profile.model}, but {policy.where('model.factory')} names {policy.model.factory}; "
            "name the profile of this model, or run loka probe"
        )
    check_sites(ProfiledSites.of(profile, path, "", option), examined.sites, examined.adapted.adaptations)
