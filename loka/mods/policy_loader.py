"""Loads a policy with the schemas of all mods, which `loka.policy` does not know."""

from __future__ import annotations

import os

from loka.mods.registry import mod_schemas
from loka.policy.load import read_policy
from loka.policy.policy import Policy


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy and the bases that it extends.

    Does not run the code that they name, and needs neither torch nor a GPU. Problems that depend on the model (patterns
    that match nothing, settings that contradict each other) are found by `make_plan`.

    Args:
        path: The policy, a YAML file.

    Raises:
        PolicyError: With all problems, each with its `file:line:column`; also if the file, or one that it extends,
            cannot be read.
        InputError: `path` is no path.

    Warns:
        RenamedWarning: For a field under its old name.
    """
    return read_policy(path, mod_schemas())
