"""Reading a policy that may list every mod there is: the two meet here, for `loka.policy` knows no mod."""

from __future__ import annotations

from pathlib import Path

from loka.mods.registry import mod_schemas
from loka.policy.load import read_policy
from loka.policy.policy import Policy


def load_policy(path: Path | str) -> Policy:
    """Read a policy and the bases that it extends. Runs no code that they name, and needs neither torch nor a GPU.

    What needs the model (patterns that match nothing, settings that contradict each other) is found by `make_plan`.

    Args:
        path: of the policy, YAML.

    Raises:
        PolicyError: with everything that is wrong, each with its `file:line:column`; the file, or one that it extends,
            cannot be read.

    Warns:
        RenamedWarning: of a field under a name that it no longer has.
    """
    return read_policy(path, mod_schemas())
