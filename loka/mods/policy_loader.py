"""Reading a policy that may list every mod there is: the two meet here, for `loka.policy` knows no mod."""

from __future__ import annotations

from pathlib import Path

from loka.mods.registry import mod_schemas
from loka.policy.load import read_policy
from loka.policy.policy import Policy


def load_policy(path: Path | str) -> Policy:
    """Reads a policy and the bases that it extends. Runs no code that they name.

    Raises PolicyError with everything that is wrong, each with its place; what needs the model (patterns that match
    nothing, settings that contradict each other) is found when a plan is made.
    """
    return read_policy(path, mod_schemas())
