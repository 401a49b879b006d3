"""What is wrong with entries of `mods` that are matched over owners: modules of two entries, or that stay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from loka.mods.adaptation import Unchanged
from loka.mods.selection import conflicts, idle_problems, named_problems, unmatched_problems
from loka.policy.policy import ModRule
from loka.policy.problems import PolicyError, Problem


def check_apart(entries: Sequence[tuple[ModRule, Iterable[str]]]) -> None:
    """Raises PolicyError where two entries of one mod are for one module; each comes with its modules."""
    problems = [
        each
        for place, (rule, names) in enumerate(entries)
        for earlier, others in entries[:place]
        for each in conflicts(rule, names, [(earlier, others)])
    ]
    if problems:
        raise PolicyError(problems)


def owner_problems(
    rule: ModRule, changed: Collection[str], left: Sequence[Unchanged], model: nn.Module, reason: str
) -> list[Problem]:
    """Patterns that match no module, modules that they name and that stay, and an entry that changes nothing.

    `changed` are the modules that it changes, `left` those that it does not, or not wholly, and why; `reason` is why
    any other module stays.
    """
    modules = [name for name, _ in model.named_modules()]
    explained = {each.name for each in left}
    stay = [each for each in left if each.name not in changed]
    stay += [Unchanged(name, reason) for name in modules if rule.names(name) and name not in {*changed, *explained}]
    problems = unmatched_problems(rule, lambda pattern: any(map(pattern.matches, modules)), modules[1:], "module")
    problems += named_problems(rule, stay)
    if problems or changed:
        return problems
    if not stay and rule.match:
        stay = [Unchanged(name, reason) for name in modules if rule.wants(name)][:1]
    return idle_problems(rule, stay, [each.name for each in stay])
