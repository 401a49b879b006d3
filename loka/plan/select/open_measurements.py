"""Opens the measurements that decide a plan: the policy's own, otherwise those that ship for its target."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from loka.devices.targets import TargetDevice
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements
from loka.policy.policy import Policy


def open_measurements(policy: Policy) -> Measurements | None:
    """The measurements in the file that a policy names; without one, the set that ships for its target, or None.

    Raises InputError, with the position of the field, where the file is missing, damaged, something else, of a newer
    LoKA, or was not measured on the policy's target, and where the target is the reference path.
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
    """A file's name in a plan: relative to the policy's directory; for an absolute path, its last component."""
    if PurePath(named).is_absolute():
        return path.name
    return PurePath(os.path.relpath(path, policy.path.parent)).as_posix()
