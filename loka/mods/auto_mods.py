"""The mods that `auto` plans without being asked: exact ones, where predicted times say that they win."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from loka.mods.mod_settings import FuseInteractionSetting, MergeSiblingsSetting, Where
from loka.policy.load import mod_parameters
from loka.policy.policy import ModRule, Policy

AUTO = (
    MergeSiblingsSetting(use="merge_siblings"),
    FuseInteractionSetting(use="fuse_interaction", where=Where.FASTER),
)


def with_auto_mods(policy: Policy) -> Policy:
    """The policy with the mods of `AUTO` that it does not name, each for all that it can take.

    A policy with `mods: {auto: false}`, or whose defaults fuse otherwise than by `auto`, stays as it is.
    """
    return replace(policy, mods=(*policy.mods, *_not_asked(policy)), auto_mods=False) if policy.auto_mods else policy


def _not_asked(policy: Policy) -> Iterator[ModRule]:
    named = {rule.use for rule in policy.mods}
    for setting in AUTO:
        if setting.use not in named:
            yield ModRule(
                use=setting.use,
                match=(),
                except_=(),
                settings=mod_parameters(setting),
                optional=True,
                note=None,
                source=f"auto: {setting.use}",
                place=policy.tree.place,
                asked=False,
            )
