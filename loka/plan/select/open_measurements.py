"""The measurements that a plan is decided by: the policy's own, else those that ship for its target."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from loka.devices.targets import TargetDevice
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements
from loka.policy.policy import Policy


def open_measurements(policy: Policy) -> Measurements | None:
    """Those of the file that a policy names; where it names none, the set that ships for its target, or None.

    Raises InputError with the place of the field where the file is missing, damaged, something else, of a newer LoKA,
    or was not measured on the policy's target, and where the target is the reference path.
    """
    path = policy.measurements_file
    if path is None:
        return Measurements.shipped(policy.target)
    if policy.target == TargetDevice.REFERENCE:
        raise InputError(
            f"{policy.where('measurements')}: measurements: the reference path has no kernels to choose from, and "
            "nothing is measured for it; leave `measurements` out, or name the target that was measured"
        )
    try:
        return Measurements.open(path, policy.target, portable_name(policy, policy.measurements or "", path))
    except InputError as error:
        raise InputError(f"{policy.where('measurements')}: measurements: {error}") from error


def portable_name(policy: Policy, named: str, path: Path) -> str:
    """A file as a plan names it: from the policy's directory; one that is named absolutely by its last part."""
    if PurePath(named).is_absolute():
        return path.name
    return PurePath(os.path.relpath(path, policy.path.parent)).as_posix()
