"""The cascade: rules in order, field by field, the last one wins; every field records who set it."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from loka.errors import Code
from loka.numerics.enums import (
    OPERANDS,
    Accumulation,
    AccumulationSetting,
    Compute,
    Gemm,
    Operand,
    Range,
    Scaling,
)
from loka.numerics.recipe import BESIDE_TRANSPOSED, TRANSPOSED_FROM, OperandPair, OperandRecipe, transposed_copy
from loka.numerics.scalings import PROBED, TOGETHER, alike, mixed
from loka.policy.expand import shown_value
from loka.policy.policy import OPERAND_FIELDS, Leaf, Match, Pattern, Policy, Rule, SizeBound
from loka.policy.problems import Place, PolicyError, Problem, printable
from loka.policy.settings import ANY_KERNEL, Assignment, Budget, GemmSettings, SiteFacts, SiteSettings

_STATIC_WITHOUT_AMAX = (
    "range: static needs a maximum: give amax, name a profile to take it from (loka probe), or use range: dynamic"
)


_AUTO = "{}, scaling: auto"  # source of a field that it chose


@dataclass(frozen=True, slots=True)
class AutoRecipe:
    """One recipe that `scaling: auto` leaves open; planning takes the fastest within the budget.

    With `transposes`, dgrad and wgrad read transposed copies where they can. All have dynamic scales: a static range is
    a promise about data that nothing but training can keep, and no chain of fused kernels quantizes in blocks.
    """

    label: str
    scaling: Scaling
    power_of_two: bool = False
    transposes: bool = False

    def transposed(self, gemm: Gemm, operand: Operand) -> bool:
        """True for an operand that is read from a transposed copy."""
        return self.transposes and (gemm, operand) in TRANSPOSED_FROM


AUTO_RECIPES = (  # the first of those that are equally fast is taken
    AutoRecipe("rowwise, powers of two, transposed copies", Scaling.ROWWISE, power_of_two=True, transposes=True),
    AutoRecipe("rowwise", Scaling.ROWWISE),
    AutoRecipe("tensorwise", Scaling.TENSORWISE),
)


class _State:
    """The leaves of one site: each one's last assignment with its position in the cascade, and all assignments."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.last: dict[str, tuple[int, Leaf]] = {}
        self.history: dict[str, list[Assignment]] = {}
        number = 0
        for rule in rules:
            for leaf in rule.leaves:
                number += 1
                path = leaf.assignment.path
                self.last[path] = (number, leaf)
                self.history.setdefault(path, []).append(leaf.assignment)

    def value(self, path: str) -> Any:
        return self.last[path][1].value

    def transposed(self, gemm: Gemm, operand: Operand) -> bool:
        """True if an operand is transposed; the leaf exists only if a rule sets it."""
        path = f"{gemm}.{operand}.requantize_transpose"
        return path in self.last and self.value(path) is True

    def kernel(self, gemm: Gemm) -> str:
        """The kernel that a rule names; the leaf exists only if a rule sets it."""
        path = f"{gemm}.kernel"
        return str(self.value(path)) if path in self.last else ANY_KERNEL

    def recipe(self, gemm: Gemm, operand: Operand) -> OperandRecipe:
        """The recipe of an operand that is not transposed."""
        return OperandRecipe(**{name: self.value(f"{gemm}.{operand}.{name}") for name in OPERAND_FIELDS})

    def later(self, *paths: str) -> Leaf:
        """The leaf that was assigned last."""
        return max((self.last[path] for path in paths), key=lambda numbered: numbered[0])[1]


def resolve_settings(policy: Policy, facts: Sequence[SiteFacts]) -> tuple[SiteSettings, ...]:
    """The settings of each site, in the order of `facts`. Sites matched by the same rules share one object.

    Raises PolicyError with all patterns that match nothing and all contradictions between the fields of a GEMM.
    """
    given = (*policy.rules, *policy.gathers)
    columns = [_matched(rule, facts) for rule in given]
    rules = [_marked(rule, column) for rule, column in zip(given, columns, strict=True)]
    problems = unmatched_patterns(given, facts)
    groups: dict[tuple[bool, ...], list[int]] = {}
    for index, matched in enumerate(zip(*columns, strict=True)):
        groups.setdefault(matched, []).append(index)
    settings: dict[int, SiteSettings] = {}
    conflicts: dict[tuple[Place, str], dict[str, list[int]]] = {}  # what is in conflict, with its sites
    for matched, sites in groups.items():
        state = _State([rule for rule, on in zip(rules, matched, strict=True) if on])
        for place, what, message in _conflicts(state, policy.profile_name is not None):
            conflicts.setdefault((place, message), {}).setdefault(what, []).extend(sites)
        settings.update(dict.fromkeys(sites, _settings(state)))
    problems += [_conflict(place, message, found, facts) for (place, message), found in conflicts.items()]
    if problems:
        raise PolicyError(sorted(problems, key=lambda each: each.place))
    return tuple(settings[index] for index in range(len(facts)))


def _matched(rule: Rule, facts: Sequence[SiteFacts]) -> list[bool]:
    matches = rule.match.matches
    return [matches(site) for site in facts]


def _marked(rule: Rule, column: list[bool]) -> Rule:
    # A rule by kind or size that happens to match one site does not name it.
    return rule.naming_one_site() if rule.match.patterns and column.count(True) == 1 else rule


def _settings(state: _State) -> SiteSettings:
    gemms = {gemm: _gemm(state, gemm) for gemm in Gemm}
    given = _site(state, gemms, _followed(state, gemms))
    if "scaling" not in state.last:
        return given
    open_ones = [found for recipe in AUTO_RECIPES if (found := _by_auto(state, recipe)) is not None]
    if not open_ones:
        return given
    first, *others = open_ones
    return replace(first, alternatives=tuple(others))


def _site(
    state: _State, gemms: dict[Gemm, GemmSettings], derived: dict[str, tuple[Assignment, ...]], recipe: str = ""
) -> SiteSettings:
    return SiteSettings(
        gemms=gemms,
        budget=Budget(**{each.name: state.value(f"budget.{each.name}") for each in fields(Budget)}),
        fuse=state.value("fuse"),
        history={path: tuple(assignments) for path, assignments in state.history.items()} | derived,
        recipe=recipe,
    )


def _by_auto(state: _State, recipe: AutoRecipe) -> SiteSettings | None:
    """The settings with a recipe that `scaling: auto` leaves open; None where a later rule contradicts it."""
    number, by = state.last["scaling"]

    def plain(gemm: Gemm, operand: Operand) -> OperandRecipe:
        format_ = state.value(f"{gemm}.{operand}.format")
        return OperandRecipe(format_, recipe.scaling, power_of_two=recipe.power_of_two)

    gemms, derived = {}, {}
    for gemm in Gemm:
        operands = _operands(gemm, plain, recipe.transposed)
        gemms[gemm] = replace(_gemm(state, gemm), operands=operands)
        for operand, chosen in zip(OPERANDS[gemm], operands, strict=True):
            fields: dict[str, object] = {"requantize_transpose": chosen.transposed}
            if not chosen.transposed:  # what is transposed follows its source
                fields |= {name: getattr(chosen, name) for name in OPERAND_FIELDS if name != "format"}
            for name, value in fields.items():
                path = f"{gemm}.{operand}.{name}"
                there = state.last.get(path)
                if there is not None and there[1].value == value:
                    continue
                if there is not None and there[0] > number:
                    return None
                if there is not None or value:
                    assigned = replace(by.assignment, path=path, value=shown_value(value))
                    derived[path] = (
                        *state.history.get(path, ()),
                        replace(assigned, source=_AUTO.format(assigned.source)),
                    )
    return _site(state, gemms, derived, recipe.label)


def _followed(state: _State, gemms: dict[Gemm, GemmSettings]) -> dict[str, tuple[Assignment, ...]]:
    """The history of each field of a transposed operand that its source determines, and not the rules."""
    found = {}
    for (gemm, operand), source in TRANSPOSED_FROM.items():
        if not state.transposed(gemm, operand):
            continue
        base = f"{gemm}.{operand}."
        recipe = gemms[gemm].operands[OPERANDS[gemm].index(operand)]
        by = state.last[base + "requantize_transpose"][1].assignment
        for name in OPERAND_FIELDS:
            value, path = getattr(recipe, name), base + name
            if value != state.value(path):
                last = replace(by, path=path, value=shown_value(value), source=f"transposed from {'.'.join(source)}")
                found[path] = (*state.history[path], last)
    return found


def _gemm(state: _State, gemm: Gemm) -> GemmSettings:
    accumulation = state.value(f"{gemm}.accumulation")
    fast = accumulation is AccumulationSetting.FAST
    return GemmSettings(
        compute=state.value(f"{gemm}.compute"),
        operands=_operands(gemm, state.recipe, state.transposed),
        accumulation=Accumulation.FAST if fast else Accumulation.PRECISE,
        padding=state.value(f"{gemm}.padding"),
        kernel=state.kernel(gemm),
        may_be_fast=accumulation is AccumulationSetting.AUTO,
    )


def _operands(
    gemm: Gemm,
    plain: Callable[[Gemm, Operand], OperandRecipe],
    transposed: Callable[[Gemm, Operand], bool],
) -> OperandPair:
    """The operands of a GEMM: `plain` ones, and copies that have the format of their source."""

    def recipe(operand: Operand, other: Operand) -> OperandRecipe:
        if not transposed(gemm, operand):
            return plain(gemm, operand)
        beside = None if transposed(gemm, other) else plain(gemm, other).scaling
        return transposed_copy(plain(*TRANSPOSED_FROM[gemm, operand]).format, beside)

    first, second = OPERANDS[gemm]
    return recipe(first, second), recipe(second, first)


def _conflicts(state: _State, profiled: bool) -> Iterator[tuple[Place, str, str]]:
    """Fields of one GEMM that contradict each other, with the GEMM or operand and the reason; none if it is kept.

    `profiled`: the policy names a profile, from which planning takes a static range's maximum.
    """
    for gemm, operands in OPERANDS.items():
        if state.value(f"{gemm}.compute") is Compute.KEEP:
            continue
        yield from _scaling_conflict(state, gemm)
        for operand in operands:
            if not state.transposed(gemm, operand):
                yield from _range_conflict(state, f"{gemm}.{operand}", profiled)


def _scaling_conflict(state: _State, gemm: Gemm) -> Iterator[tuple[Place, str, str]]:
    names = OPERANDS[gemm]
    copies = [operand for operand in names if state.transposed(gemm, operand)]
    scalings = {operand: state.value(f"{gemm}.{operand}.scaling") for operand in names if operand not in copies}
    probed = PROBED.intersection(scalings.values())
    sources = {copy: state.value(f"{'.'.join(TRANSPOSED_FROM[gemm, copy])}.scaling") for copy in copies}
    for copy in (copy for copy, scaling in sources.items() if scaling in PROBED):
        message = (
            f"nothing is transposed from {sources[copy]}, which is simulated alone: write requantize_transpose: false"
        )
        yield _place(state.last[f"{gemm}.{copy}.requantize_transpose"][1]), gemm, message
    if probed and gemm is not Gemm.FPROP:
        leaf = state.later(*(f"{gemm}.{operand}.scaling" for operand in scalings))
        yield _place(leaf), gemm, f"{min(probed)} is simulated for the forward alone; set it under fprop"
    elif not copies and frozenset(scalings.values()) not in TOGETHER:
        pair = " by ".join(f"{operand} {scaling}" for operand, scaling in scalings.items())
        *some, last = alike()
        choices = [f"both {', '.join(some)} or {last}", *(f"one {one} and the other {other}" for one, other in mixed())]
        leaf = state.later(*(f"{gemm}.{operand}.scaling" for operand in names))
        yield _place(leaf), gemm, f"no kernel multiplies {pair}; give {', or '.join(choices)}"
    elif len(copies) == 1 and not {*scalings.values()} <= {*BESIDE_TRANSPOSED}:
        ((other, scaling),), (copy,) = scalings.items(), copies
        message = (
            f"no kernel multiplies {other} {scaling} by {copy} transposed, which has one scale; give {other} "
            f"rowwise or tensorwise, or {copy} requantize_transpose: false"
        )
        yield _place(state.later(f"{gemm}.{copy}.requantize_transpose", f"{gemm}.{other}.scaling")), gemm, message


def _range_conflict(state: _State, base: str, profiled: bool) -> Iterator[tuple[Place, str, str]]:
    amax, range_ = state.last[f"{base}.amax"][1], state.last[f"{base}.range"][1]
    if range_.value is Range.STATIC and amax.value is None and not profiled:
        # `range: dynamic` after `range: static` is no conflict, so the last range is the offending one.
        yield _place(range_), base, _STATIC_WITHOUT_AMAX
    if range_.value is Range.DYNAMIC and amax.value is not None:
        yield _place(amax), base, "amax is for range: static, and the range is dynamic; add range: static"


def _place(leaf: Leaf) -> Place:
    return Place(leaf.assignment.file, leaf.assignment.line, leaf.column)


def _conflict(place: Place, message: str, found: dict[str, list[int]], facts: Sequence[SiteFacts]) -> Problem:
    """One problem for all that is in conflict for one reason, with the first of its sites."""
    sites = {site for each in found.values() for site in each}
    others = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    message = f"{next(iter(found))}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {message}"
    return Problem(place, f"{message} (at {printable(facts[min(sites)].name)}{others})", Code.CONTRADICTION)


MAX_CANDIDATES = 2000
MAX_HINTS = 3
_NO_GEMM = "the model has no GEMM: correct the factory"


def unmatched_patterns(rules: Sequence[Rule], facts: Sequence[SiteFacts]) -> list[Problem]:
    """A problem for each pattern, and each mapping as a whole, that no site matches; none for `optional` rules."""
    problems: list[Problem] = []
    names = [site.name for site in facts]
    candidates: list[str] | None = None
    for rule in rules:
        if rule.optional:
            continue
        dead = [pattern for pattern in rule.match.patterns if not any(map(pattern.compiled.fullmatch, names))]
        if dead and candidates is None:
            candidates = _candidates(names)
        for pattern in dead:
            message = f"{pattern.text!r} matches no site; {_hint(pattern, candidates or [], _NO_GEMM)}"
            problems.append(Problem(pattern.place, f"{message}, or set optional: true", Code.NO_MATCH))
        if not dead and not any(map(rule.match.matches, facts)):
            message = f"no site is {rule.match.text}; {_what_there_is(rule.match, facts)}, or set optional: true"
            problems.append(Problem(rule.place, message, Code.NO_MATCH))
    return problems


def hint(pattern: Pattern, names: Sequence[str], nothing: str) -> str:
    """Advice for a pattern that matches none of some names; `nothing` if there are no names."""
    return _hint(pattern, _candidates(names), nothing)


def _hint(pattern: Pattern, candidates: list[str], nothing: str) -> str:
    if not candidates:
        return nothing
    word = _as_glob(pattern.text)
    close = difflib.get_close_matches(word, candidates, n=MAX_HINTS, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}? Correct it"
    shown = ", ".join(map(repr, candidates[:MAX_HINTS]))
    return f"the model has, for example, {shown}: correct it"


def _candidates(names: Sequence[str]) -> list[str]:
    """Patterns that match something: names with their numbers starred, the names themselves, and their prefixes."""
    starred = dict.fromkeys(_starred(name) for name in names)
    begins = dict.fromkeys(
        ".".join([*parts[:length], "*"])
        for parts in (name.split(".") for name in starred)
        for length in range(1, len(parts))
    )
    return list(dict.fromkeys([*starred, *begins, *names]))[:MAX_CANDIDATES]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _as_glob(text: str) -> str:
    """A regular expression as an approximate glob, for comparison with names."""
    if not text.startswith("re:"):
        return text[:200]
    return re.sub(r"(\\d|\.|\[[^\]]*\])[*+]", "*", text[3:203]).replace("\\.", ".").strip("^$")


def _what_there_is(match: Match, facts: Sequence[SiteFacts]) -> str:
    """The kinds and the ranges of the model, for the criteria in the mapping."""
    if not facts:
        return _NO_GEMM
    parts = []
    if match.kind is not None:
        counts = Counter(site.kind for site in facts)
        parts.append("its kinds are " + ", ".join(f"{kind} ({count})" for kind, count in sorted(counts.items())))
    parts += [f"its {bound.field} goes from {_span(bound, facts)}" for bound in match.bounds]
    return "of the model, " + " and ".join(parts or ["no site has all of it"]) + ": correct the match"


def _span(bound: SizeBound, facts: Sequence[SiteFacts]) -> str:
    values = [getattr(site, bound.field) for site in facts]
    return f"{min(values):.4g} to {max(values):.4g}" if bound.field == "share" else f"{min(values)} to {max(values)}"
