"""Plans the draft of `loka init` before it is written, so that its comments say what `loka plan` then prints."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loka.errors import InputError
from loka.numerics.enums import Compute
from loka.plan.draft import DraftOptions, draft_policy
from loka.plan.mod_proposals import Drafted, Proposal
from loka.plan.mod_words import describe_changes
from loka.plan.plan import Plan
from loka.plan.planner import make_plan

MANY = 1000  # sites beyond which a draft is not planned: thousands of layers take a minute


def checked(options: DraftOptions, drafted: Drafted) -> Drafted:
    """The contents of a first policy with the results of planning it.

    Mods that keep the function are planned together, as they are if the comments become mods: those that change nothing
    are left out, and the others say what they changed. `could` is the share of FLOPs that `compute: fp8` would take. If
    the model cannot be planned, proposals that nothing confirmed are left out, and `could` stays None. A model of more
    than MANY sites is not planned: its proposals stay as they were found.
    """
    if len(drafted.sites) > MANY:
        return drafted
    exact = [mod for mod in drafted.mods if mod.exact]
    changing = _changing(options, drafted, exact) if exact else ()
    forced = _planned(options, drafted, (), Compute.FP8)
    return replace(
        drafted,
        mods=(*changing, *(mod for mod in drafted.mods if not mod.exact)),
        could=None if forced is None else forced.share_fp8,
    )


def _changing(options: DraftOptions, drafted: Drafted, exact: Sequence[Proposal]) -> tuple[Proposal, ...]:
    plan = _planned(options, drafted, exact, Compute.AUTO)
    found = {mod.use: mod for mod in plan.mods if mod.rewritten} if plan is not None else {}
    return tuple(replace(mod, what=describe_changes(found[mod.use])) for mod in exact if mod.use in found)


def _planned(options: DraftOptions, drafted: Drafted, mods: Sequence[Proposal], compute: Compute) -> Plan | None:
    with tempfile.TemporaryDirectory(prefix="loka-init-") as folder:
        path = Path(folder) / "draft.yaml"
        path.write_text(draft_policy(options, drafted.sites, mods, compute=compute, active=True), encoding="utf-8")
        try:
            return make_plan(path)
        except InputError:  # `loka plan` will say what is wrong
            return None
