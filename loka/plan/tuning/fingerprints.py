"""Digests that say whether a record of `loka tune` still holds: of a model, of what is asked of it, of what runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from torch import nn

from loka.graph.sites.site import Site
from loka.plan.plan import GemmPlan, Plan, SitePlan
from loka.plan.serialize import to_json
from loka.policy.policy import Policy
from loka.policy.settings import SiteSettings


def decisions_sha256(plan: Plan) -> str:
    """Names a plan by what runs: kernels, recipes, forwards and mods, without reasons, evidence and predicted times."""
    bare = replace(
        plan,
        name="",
        policy_files=(),
        sites=tuple(map(_bare, plan.sites)),
        skipped=(),
        loka_version="",
        rule_notes=(),
        profile=None,
        measurements=None,
        mods=tuple(
            replace(mod, source="", place="", promise="", unchanged=(), note="", gain=None) for mod in plan.mods
        ),
        interactions=tuple(replace(each, chosen=None, as_is=None) for each in plan.interactions),
        execution=None,
        ne_budget=None,
        tuned=None,
        gathers=(),
        exchange=None,
    )
    return hashlib.sha256(to_json(bare).encode()).hexdigest()


def _bare(plan: SitePlan) -> SitePlan:
    gemms = tuple(_bare_gemm(gemm) for gemm in plan.gemms)
    return SitePlan(replace(plan.site, where=""), gemms, {}, region=plan.region)


def _bare_gemm(plan: GemmPlan) -> GemmPlan:
    return replace(plan, reason="", rejected=(), evidence=None, times=())


def model_sha256(factory: str, model: nn.Module, sites: Sequence[Site]) -> str:
    """Names a built model: its modules' classes, the forms of its Parameters and buffers, and its GEMMs."""
    lines: list[object] = [factory]
    lines += [
        (name, f"{type(module).__module__}.{type(module).__qualname__}") for name, module in model.named_modules()
    ]
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        lines.append((name, list(value.shape), str(value.dtype), value.requires_grad))
    lines += [(site.name, site.kind.value, asdict(site.rows), site.k, site.n, site.calls, site.gemms) for site in sites]
    return _digest(lines)


def settings_sha256(policy: Policy, sites: Sequence[Site], settings: Sequence[SiteSettings]) -> str:
    """Names what a policy asks of each site, of its mods and of the whole, wherever it is written."""
    known: dict[int, object] = {}
    lines: list[object] = [policy.ne_percent]
    for mod in (rule for rule in policy.mods if rule.asked):
        patterns = [[each.text for each in part] for part in (mod.match, mod.except_)]
        lines.append((mod.use, patterns, mod.settings))
    for site, wanted in zip(sites, settings, strict=True):
        if id(wanted) not in known:
            known[id(wanted)] = _asked(wanted)
        lines.append((site.name, known[id(wanted)]))
    return _digest(lines)


def _asked(wanted: SiteSettings) -> object:
    gemms = {gemm.value: asdict(asked) for gemm, asked in wanted.gemms.items()}
    return gemms, asdict(wanted.budget), wanted.fuse.value, wanted.recipe, [*map(_asked, wanted.alternatives)]


def _digest(lines: object) -> str:
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
