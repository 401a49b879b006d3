"""Choices among what a policy leaves open, which a measured step can decide instead of predicted times.

Open are the GEMMs with `compute: auto`, as far as the evidence finds them safe, the recipes of `scaling: auto`,
`fuse: auto`, and interactions with `where: faster`. What a policy forces stays as it is in every choice, and the budget
of errors is applied after the choice, so that none can exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loka.graph.sites.site import Site
from loka.numerics.enums import Compute, Fuse, Gemm
from loka.policy.settings import Assignment, GemmSettings, SiteSettings

MEASURED = "a measured step"  # source of what a choice decides, in the history of a field


class SitePrecision(StrEnum):
    """Of the GEMMs that `compute: auto` leaves open and the evidence finds safe."""

    FP8 = "fp8"
    BF16 = "bf16"
    OPEN = "open"  # by predicted time


@dataclass(frozen=True, slots=True)
class SiteChoice:
    """One way for some sites, or for all."""

    precision: SitePrecision
    recipe: str = ""  # a label of AUTO_RECIPES; "": the policy's, or by predicted time
    fuse: Fuse | None = None  # where the policy has `fuse: auto`; None: by predicted time
    sites: tuple[str, ...] = ()  # names; (): all sites


@dataclass(frozen=True, slots=True)
class Choice:
    """Ways for the sites of a model; what it does not name is decided by predicted times. () is the plan as it stands.

    A later entry of `sites` wins over an earlier one.
    """

    sites: tuple[SiteChoice, ...] = ()
    interactions: bool | None = None  # `where: faster`: all in LoKA's kernels, or none; None: by predicted time

    @property
    def as_it_stands(self) -> bool:
        """True if predicted times decide everything."""
        return not self.sites and self.interactions is None

    @property
    def is_switch(self) -> bool:
        """True if it is for some sites of the plan as it stands, not for the whole model with exceptions."""
        return bool(self.sites) and bool(self.sites[0].sites)

    def of(self, site: str) -> SiteChoice | None:
        """The way for a site; None where predicted times decide."""
        return next((each for each in reversed(self.sites) if not each.sites or site in each.sites), None)

    def then(self, other: Choice) -> Choice:
        """Both; where they differ, the other's."""
        interactions = self.interactions if other.interactions is None else other.interactions
        return Choice((*self.sites, *other.sites), interactions)


AS_IT_STANDS = Choice()


def chosen_settings(
    sites: Sequence[Site], settings: Sequence[SiteSettings], choice: Choice, by: str
) -> tuple[SiteSettings, ...]:
    """The settings with what a choice decides; `settings[i]` belongs to `sites[i]`. `by`: the file of the record.

    Sites that shared an object, and have one choice, share one again.
    """
    made: dict[tuple[int, SiteChoice], SiteSettings] = {}
    found = []
    for site, wanted in zip(sites, settings, strict=True):
        way = choice.of(site.name)
        if way is None:
            found.append(wanted)
            continue
        key = (id(wanted), replace(way, sites=()))
        if key not in made:
            made[key] = _chosen(_with_recipe(wanted, way.recipe, by), way, by)
        found.append(made[key])
    return tuple(found)


def is_open(wanted: SiteSettings) -> bool:
    """True if a policy leaves something of a site to times."""
    return bool(wanted.alternatives) or any(each.compute is Compute.AUTO for each in wanted.gemms.values())


def _with_recipe(wanted: SiteSettings, recipe: str, by: str) -> SiteSettings:
    """The settings with one of the recipes that are left open; unchanged where this one is not."""
    named = next((each for each in (wanted, *wanted.alternatives) if recipe and each.recipe == recipe), None)
    if named is None:
        return wanted
    scaling = replace(named.history["scaling"][-1], value=recipe, source=MEASURED, file=by, line=0)
    history = {**named.history, "scaling": (*named.history["scaling"], scaling)}
    return replace(named, alternatives=(), history=history)


def _chosen(wanted: SiteSettings, way: SiteChoice, by: str) -> SiteSettings:
    gemms: dict[Gemm, GemmSettings] = {}
    history: dict[str, tuple[Assignment, ...]] = dict(wanted.history)
    for gemm, asked in wanted.gemms.items():
        gemms[gemm] = asked
        if asked.compute is not Compute.AUTO:
            continue
        if way.precision is SitePrecision.FP8:
            gemms[gemm] = replace(asked, by_time=False)
        elif way.precision is SitePrecision.BF16:
            gemms[gemm] = replace(asked, compute=Compute.KEEP)
            _add(history, f"{gemm.value}.compute", Compute.KEEP.value, by)
    fuse = wanted.fuse
    if way.fuse is not None and fuse is Fuse.AUTO:
        fuse = way.fuse
        _add(history, "fuse", fuse.value, by)
    others = tuple(_chosen(each, way, by) for each in wanted.alternatives)
    return replace(wanted, gemms=gemms, fuse=fuse, history=history, alternatives=others)


def _add(history: dict[str, tuple[Assignment, ...]], path: str, value: str, by: str) -> None:
    history[path] = (*history.get(path, ()), Assignment(path, value, MEASURED, by, 0))
