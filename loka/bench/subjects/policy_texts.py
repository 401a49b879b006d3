"""Policies in text that are made of another one: with some of its mods, and with rules after its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import yaml

from loka.policy.policy import Policy
from loka.policy.tree import plain

KEEP_AND_FUSE: Mapping[str, Any] = {"match": "*", "compute": "keep", "fuse": "always", "optional": True}
KEEP_ALL: Mapping[str, Any] = {**KEEP_AND_FUSE, "fuse": "never"}


def policy_tree(policy: Policy) -> dict[str, Any]:
    """The policy with its bases merged in, as dicts and lists."""
    return cast("dict[str, Any]", plain(policy.tree))


def policy_text(
    policy: Policy,
    name: str,
    mods: Collection[str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    profiled: bool = True,
) -> str:
    """The policy as YAML under another name, with only `mods` (None: all), and with more `rules` after its own.

    Files are named by absolute paths. Without `profiled` the profile is left out: it describes the model with all mods.
    With only some mods rules become optional: they may name sites that exist only with a mod.
    """
    tree = policy_tree(policy)
    tree.pop("extends", None)
    tree["name"] = name
    tree["model"] = {**tree["model"], "batch_size": policy.model.batch_size}
    own = tree.get("rules") or []
    if mods is not None:
        tree["mods"] = [entry for entry in tree.get("mods") or [] if entry["use"] in mods]
        own = [{**rule, "optional": True} for rule in own]
    tree["rules"] = [*own, *map(dict, rules)]
    files = {"profile": policy.profile_file if profiled else None, "measurements": policy.measurements_file}
    for field, file in files.items():
        tree.pop(field, None)
        if file is not None:
            tree[field] = str(file.resolve())
    return yaml.safe_dump(tree, sort_keys=False)
