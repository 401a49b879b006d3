"""batch_small: the small linears of a model that can be one batched GEMM, and the resulting site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loka.graph.sites.site import GemmKind, Site
from loka.mods.protocols import SiteMod, UnplannedModel
from loka.mods.rewriting.batched_linears import FEW, FEWEST, NAME, find
from loka.mods.rewriting.site_rewriting import ModelInChange, SiteOutcome, joined_site
from loka.numerics.enums import Compute
from loka.policy.policy import ModRule
from loka.policy.settings import SiteSettings

BATCHED = "batch_small: it is one batched product with others, which stays in the model's dtype"
_NAMED = "a rule asks for it in FP8 by its name, and a batched product stays in the model's dtype"
_MERGED = "merge_siblings has made it one GEMM with others"
_LARGE = "it is larger than max_k and max_n allow"
_LIMIT = 256  # of K and N, for proposals


@dataclass(frozen=True, slots=True)
class BatchSmallMod:
    """Batches the small sites of one shape that one forward calls over different tensors."""

    name: str = NAME
    exact: bool = True
    description: str = (
        "small linears of one shape are one batched product, in the model's dtype: one launch instead of many"
    )

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Batch the sites of a policy entry."""
        outcome, limits = SiteOutcome(model, rule, usual=(FEW, _LARGE)), dict(rule.settings)
        wanted = {}
        for site in outcome.wanted():
            if site.k > int(limits["max_k"]) or site.n > int(limits["max_n"]):
                outcome.leave([site.name], _LARGE)
            elif _is_fp8_by_name(model.settings[site.name]):
                outcome.leave([site.name], _NAMED)
            elif site.members:
                outcome.leave(site.members, _MERGED)
            else:
                wanted[site.name] = site
        groups = _families(model, wanted)
        model.capture(groups)
        for owner, names in groups.items():
            outcome.join(owner, [name for name in names if name in model.sites], find, batched_site)
        outcome.leave(wanted, FEW)
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of linears of one list and one shape, below the default limits, that do not read one tensor.

        Square ones are excluded: those of a list may also be applied in sequence, as cross layers are.
        """
        siblings = {name for names in model.siblings for name in names}
        alike: dict[tuple[object, ...], list[str]] = {}
        for site in model.sites:
            owner, _, last = site.name.rpartition(".")
            fits = site.k <= _LIMIT and site.n <= _LIMIT and site.k != site.n
            if site.kind is GemmKind.LINEAR and last.isdecimal() and fits and site.name not in siblings:
                alike.setdefault((owner, site.rows, site.k, site.n), []).append(site.name)
        families = (names for names in alike.values() if len(names) >= FEWEST)
        small = sum(len(names) for names in families if _is_in_a_list(names[0], model.module))
        return f"{small} small linears of one shape may read different inputs" if small else None


def _is_in_a_list(name: str, model: nn.Module) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList)


def _is_fp8_by_name(settings: SiteSettings) -> bool:
    """True if a rule that names this one site asks for any of its GEMMs in FP8."""
    fp8 = (gemm for gemm, asked in settings.gemms.items() if asked.compute is Compute.FP8)
    rules = (settings.compute_set_by(gemm) for gemm in fp8)
    return any(rule is not None and rule.names_one_site for rule in rules)


def _families(model: ModelInChange, wanted: Mapping[str, Site]) -> dict[str, list[str]]:
    """Sites of one shape that one forward may call, by that forward's module, the innermost first.

    These are the sites that one module calls, and those whose names differ in one number ("towers.*.fc"), which are
    assigned to the module around them.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, site in wanted.items():
        shape = (site.rows, site.k, site.n, *model.kind_of_weight(site))
        alike.setdefault((site.owner, None, *shape), []).append(name)
        steps = name.split(".")
        for place, step in enumerate(steps):
            if step.isdecimal():
                family = (*steps[:place], "*", *steps[place + 1 :])
                alike.setdefault((None, family, *shape), []).append(name)
    groups: dict[str, dict[str, None]] = {}
    for names in alike.values():
        if len(names) >= FEWEST:
            groups.setdefault(model.around(names), {}).update(dict.fromkeys(names))
    depths = sorted(groups, key=lambda owner: -len(owner.split(".")) if owner else 0)
    return {owner: list(groups[owner]) for owner in depths}


def batched_site(name: str, owner: str, members: Sequence[Site]) -> Site:
    """The site of a batched GEMM; M, K and N are those of one linear, `calls` counts them all."""
    return joined_site(
        name,
        owner,
        members,
        kind=GemmKind.BMM,
        calls=sum(site.calls for site in members),
        calls_eval=sum(site.calls_eval for site in members),
        blocked=BATCHED,
    )


MOD: SiteMod = BatchSmallMod()
