"""Loads a policy with the schemas of all mods, which `loka.policy` does not know."""

from __future__ import annotations

from pathlib import Path

from loka.mods import mod_settings
from loka.paths import path_argument
from loka.policy.load import read_policy
from loka.policy.policy import Policy

_PATH = "the path of a policy, a YAML file"


def load_policy(path: Path | str) -> Policy:
    """Read a policy and the bases that it extends.

    Does not run the code that they name, and needs neither torch nor a GPU. Problems that depend on the model (patterns
    that match nothing, settings that contradict each other) are found by `make_plan`.

    Args:
        path: The policy, a YAML file.

    Raises:
        PolicyError: With all problems, each with its `file:line:column`; also if the file, or one that it extends,
            cannot be read.
        InputError: `path` is no path.
    """
    return read_policy(path_argument(path, "load_policy: path", _PATH), mod_settings.MOD_SCHEMAS)


def policy_argument(policy: object, what: str) -> Policy:
    """The policy that an argument of the Python API is or names; `what` names the argument in messages.

    Raises PolicyError as `load_policy` does, and InputError for an argument of another type.
    """
    if isinstance(policy, Policy):
        return policy
    return load_policy(path_argument(policy, what, f"{_PATH}, or the result of loka.load_policy"))
