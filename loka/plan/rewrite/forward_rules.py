"""What is wrong with a policy's entries for the mods that rewrite forwards, once these have looked at the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from loka.mods.conflicts import conflicts
from loka.mods.selection import idle_problems, named_problems, unmatched_problems
from loka.plan.report.mod_plans import Forwards
from loka.policy.policy import ModRule, Pattern
from loka.policy.problems import PolicyError, Problem


class Looked(Forwards, Protocol):
    """What an entry made, and the names of all sites that it could be asked for."""

    @property
    def known(self) -> tuple[str, ...]: ...


def check_forward_mods(rules: Sequence[ModRule], made: Mapping[str, Looked]) -> None:
    """Raise PolicyError with all that is wrong; `made` holds what entries made, by their `source`.

    That is a site that an entry names and cannot take, a pattern that matches no site, a site that two entries of one
    mod are for, and an entry that changes nothing.
    """
    problems: list[Problem] = []
    earlier: list[tuple[ModRule, tuple[str, ...]]] = []
    for rule in rules:
        looked = made.get(rule.source)
        if looked is None:
            continue
        taken = tuple(site for each in looked.rewritten for site in each.sites)
        wrong = named_problems(rule, looked.unchanged)
        wrong += unmatched_problems(rule, _alive_among(looked.known), looked.known, "site")
        alike = [(other, names) for other, names in earlier if other.use == rule.use]
        both = [name for _, names in alike for name in names if rule.wants(name)]
        wrong += conflicts(rule, both, alike)
        if not taken and not wrong:
            wrong = idle_problems(rule, looked.unchanged, [name for name in looked.known if rule.wants(name)])
        problems += wrong
        earlier.append((rule, taken))
    if problems:
        raise PolicyError(problems)


def _alive_among(known: Sequence[str]) -> Callable[[Pattern], bool]:
    return lambda pattern: any(map(pattern.matches, known))
