"""The mods of a plan in words, and the mods that concern a site."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.registry import ModKind, module_mod, names_of
from loka.plan.format import common_pattern, grouped, pattern_of
from loka.plan.plan import ModPlan, Plan


def describe_changes(mod: ModPlan) -> str:
    """Changes of a mod: `12 biases`, `8 LayerNorm -> BlockNorm 256, 2 RMSNorm -> BlockNorm 64`; "nothing"."""
    words = describe_adaptations(mod.adaptations)
    made = _alike((each.owner, each.what) for each in mod.rewritten)
    words += [f"{what} in {owner}{f' ({count} times)' if count > 1 else ''}" for owner, what, count in made]
    return ", ".join(words) or "nothing"


def describe_adaptations(adaptations: Sequence[Adaptation]) -> list[str]:
    """Adaptations in words, with numbers of modules: `12 biases dropped`, `8 LayerNorm -> BlockNorm 256`."""
    alike = grouped(adaptations, _describe_each)
    counted = [(found[0], sum(len(each.modules) for each in found)) for found in alike]
    return [f"{count} {_describe_each(adaptation, count)}" for adaptation, count in counted]


def describe_mod(plan: Plan, mod: ModPlan) -> str:
    """One line: `block_norm (ranker.yaml:14), a new model to train: 8 LayerNorm -> BlockNorm 256; gains ...`."""
    kind, gain = "the same function" if mod.exact else "a new model to train", describe_gain(plan, mod)
    return f"{mod.use} ({mod.place}), {kind}: {describe_changes(mod)}{f'; {gain}' if gain else ''}"


def describe_gain(plan: Plan, mod: ModPlan) -> str:
    """Gain of a mod in a plan: `gains 12.3 us of a training step, 3.1 % (estimated)`; "" where unknown.

    If torch.compile was never measured for its interactions, says so.
    """
    if mod.gain is None:
        untimed = [each for each in plan.interactions if each.chosen is not None and each.as_is is None]
        if mod.use in names_of(ModKind.INTERACTIONS) and len(untimed) == len(plan.interactions) > 0:
            return "its gain is not known: never measured by torch.compile"
        return ""
    if mod.gain.us == 0:
        return "no difference in what is timed"
    word = "gains" if mod.gain.us >= 0 else "costs"
    return f"{word} {abs(mod.gain.us):.1f} us of a training step, {100 * abs(mod.gain.share):.1f} % (estimated)"


def describe_unchanged(unchanged: Sequence[Unchanged]) -> list[str]:
    """Things that a mod did not change, a line for each reason: `layers.*.norm (4): 100 is no multiple of 16`."""
    groups = _alike((each.name, each.reason) for each in unchanged)
    return [f"{name}{f' ({count})' if count > 1 else ''}: {reason}" for name, reason, count in groups]


def _alike(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Groups names that differ only in numbers and share a text: the pattern of the names, the text, their number."""
    groups = grouped(pairs, lambda each: (pattern_of(each[0]), each[1]))
    names = [common_pattern([name for name, _ in group]) or "the model itself" for group in groups]
    return [(name, group[0][1], len(group)) for name, group in zip(names, groups, strict=True)]


@dataclass(frozen=True, slots=True)
class Touch:
    """A change of one mod at a site or next to it."""

    mod: str  # "mod 2: block_norm"
    place: str  # "ranker.yaml:14"
    what: str  # "layers.0.fmb.1: LayerNorm -> BlockNorm 256"
    note: str = ""


def touches(plan: Plan, site: str) -> tuple[Touch, ...]:
    """Changes of mods at a site or its neighbours: modules next to it, without another site in between."""
    sites = {each.site.name for each in plan.sites}
    owner = next((each.site.owner for each in plan.sites if each.site.name == site), "")
    found = []
    for mod in plan.mods:
        whats = [
            f"{name}: {_describe_each(adaptation)}"
            for adaptation in mod.adaptations
            for name in adaptation.modules
            if name in (site, owner) or _is_beside(name, site, sites)
        ]
        whats += [each.what for each in mod.rewritten if site in (each.site, *each.sites)]
        whats += [f"left as it is: {each.reason}" for each in mod.unchanged if each.name == site]
        found += [Touch(mod.source, mod.place, what, mod.note) for what in whats]
    return tuple(found)


def _is_beside(name: str, site: str, sites: Collection[str]) -> bool:
    """True for a module next to a site: of the same parent and, in a list, without another site in between."""
    parent, dot, own = site.rpartition(".")
    other, _, last = name.rpartition(".")
    if parent != other or name in sites:
        return False
    if not (own.isdecimal() and last.isdecimal()):
        return True
    first, second = sorted((int(own), int(last)))
    return not any(f"{parent}{dot}{number}" in sites for number in range(first + 1, second))


def _describe_each(adaptation: Adaptation, count: int = 1) -> str:
    """Change of each of `count` modules: `bias dropped`, `LayerNorm -> BlockNorm 256`."""
    if adaptation.mod in names_of(ModKind.MODULES):
        return module_mod(adaptation.mod).describe(adaptation, count)
    return f"{adaptation.replaces.rpartition('.')[2]} by {adaptation.mod}"  # in a plan of another version of LoKA
