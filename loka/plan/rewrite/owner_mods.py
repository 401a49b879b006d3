"""Traces owners whose statements mods rewrite, and reports entries without anything to rewrite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from loka.graph.ir import ForwardIR, Refused
from loka.graph.patterns.owners import RegionScope, relative
from loka.graph.sites.flow import Flow
from loka.mods.adaptation import RewriteResult, Setting, Unchanged
from loka.mods.modded_model import conflicts, idle_problems, named_problems, unmatched_problems
from loka.mods.protocols import OwnerMod
from loka.mods.registry import ModKind, names_of, owner_mod
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewritingTracer, checked, is_under, writer_of
from loka.plan.format import common_pattern, pattern_of
from loka.policy.policy import ModRule
from loka.policy.problems import PolicyError, Problem


@dataclass(frozen=True, slots=True)
class OwnerRequest:
    """The request of one entry of `mods`."""

    rule: ModRule
    mod: OwnerMod
    scopes: tuple[OwnerScope, ...]

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The mod's own parameters."""
        return dict(self.rule.settings)

    def means(self, writer: str) -> bool:
        """True if the statements in a module's forward are to be rewritten."""
        if any(pattern.matches(writer) for pattern in self.rule.except_):
            return False
        return any(is_under(writer, scope.owner) for scope in self.scopes)


def requested_owners(rules: Sequence[ModRule], model: nn.Module, flow: Flow) -> tuple[OwnerRequest, ...]:
    """The requests of entries. Raises PolicyError if two of one mod match one module, naming both."""
    requests: list[OwnerRequest] = []
    for name in names_of(ModKind.OWNERS):
        mod = owner_mod(name)
        found = [OwnerRequest(rule, mod, mod.scopes(model, rule.wants, flow)) for rule in rules if rule.use == name]
        writers = [[name for scope in each.scopes for name in scope.writers if each.means(name)] for each in found]
        check_apart([(each.rule, names) for each, names in zip(found, writers, strict=True)])
        requests += found
    return tuple(requests)


_Outcome = tuple[str, str]  # the entry's source, and the owner of a traced scope


@dataclass(slots=True)
class OwnerTracer:
    """Traces owners, with the changes of sites applied, and lets mods rewrite the result."""

    tracer: RewritingTracer
    requests: tuple[OwnerRequest, ...]
    written: dict[_Outcome, tuple[str, ...]] = field(default_factory=dict)  # the module of each rewritten statement
    reasons: dict[_Outcome, str] = field(default_factory=dict)  # why nothing in it is rewritten
    _rewritten: dict[object, tuple[ForwardIR, tuple[str, ...]] | str] = field(default_factory=dict)

    @property
    def scopes(self) -> tuple[OwnerScope, ...]:
        """All scopes of the requests."""
        return tuple(scope for request in self.requests for scope in request.scopes)

    def capture(self, owners: Collection[str]) -> None:
        """Run the model to capture the calls of some modules."""
        self.tracer.capture(owners)

    def __call__(self, scope: RegionScope) -> ForwardIR | Refused:
        """The forward of one owner, or the reason why it cannot be traced."""
        forward = self.tracer(scope)
        if isinstance(forward, Refused):
            return forward
        for request in self.requests:
            outcome = (request.rule.source, scope.owner)
            self.written[outcome] = ()
            meant = tuple(request.means(writer_of(forward, place)) for place in range(len(forward.statements)))
            if not any(meant):
                continue
            key = (request.mod.name, replace(forward, owner=""), request.rule.settings, meant)
            if key not in self._rewritten:
                self._rewritten[key] = self._rewrite(scope, forward, request)
            found = self._rewritten[key]
            if isinstance(found, str):
                self.reasons[outcome] = found
                continue
            forward = replace(found[0], owner=scope.owner)
            self.written[outcome] = tuple(".".join(filter(None, (scope.owner, writer))) for writer in found[1])
        return forward

    def _rewrite(
        self, scope: RegionScope, forward: ForwardIR, request: OwnerRequest
    ) -> tuple[ForwardIR, tuple[str, ...]] | str:
        """The rewritten forward, checked against the module's own, and the writers; or the reason why not."""
        found = request.mod.rewrite(forward, request.means, request.settings)
        if isinstance(found, str):
            return found
        made = checked(self.tracer.tracer, scope, found.forward, (*forward.rewritten, request.mod.name))
        notes = {statement.target: statement.note for statement in forward.statements}
        return made if isinstance(made, str) else (made, tuple(notes[name] for name in found.targets))


@dataclass(frozen=True, slots=True)
class ModOutcome:
    """Changes that one entry of the policy's `mods` made to forwards, and what it was asked for and did not change."""

    rewritten: tuple[RewriteResult, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()


def owner_outcomes(
    tracer: OwnerTracer, owners: Collection[str], refused: Mapping[str, str], model: nn.Module
) -> dict[str, ModOutcome]:
    """The result of each entry, by its `source`, in the forwards of the plan: those of `owners`.

    `refused` are modules that could not be traced, with reasons. Raises PolicyError for entries that rewrite nothing,
    and for modules that they name and that are not changed.
    """
    found: dict[str, ModOutcome] = {}
    problems: list[Problem] = []
    for request in tracer.requests:
        outcome, writers = _outcome(request, tracer, owners, refused)
        found[request.rule.source] = outcome
        left = {each.name for each in outcome.unchanged}
        done = [writer for writer in writers if request.means(writer)]
        changed = {name for name, _ in model.named_modules() if any(is_under(writer, name) for writer in done)} - left
        problems += owner_problems(request.rule, changed, outcome.unchanged, model, request.mod.nothing)
    if problems:
        raise PolicyError(problems)
    return found


def _outcome(
    request: OwnerRequest, tracer: OwnerTracer, owners: Iterable[str], refused: Mapping[str, str]
) -> tuple[ModOutcome, set[str]]:
    """The result of an entry, and the modules whose forwards contain rewritten statements."""
    rewritten = []
    done: set[str] = set()
    for owner in owners:
        writers = tracer.written.get((request.rule.source, owner), ())
        if writers:
            done.update(writers)
            rewritten.append(RewriteResult(request.mod.name, owner, (), "", _what(request, owner, writers)))
    own = {owner: reason for (source, owner), reason in tracer.reasons.items() if source == request.rule.source}
    reasons = {**own, **refused}
    left = [
        Unchanged(scope.owner, reasons.get(scope.owner, request.mod.nothing))
        for scope in request.scopes
        if scope.owner in reasons or not any(is_under(writer, scope.owner) for writer in done)
    ]
    return ModOutcome(tuple(rewritten), tuple(left)), done


def _what(request: OwnerRequest, owner: str, writers: Sequence[str]) -> str:
    """Description of the changes, by writer: `9 residual sums in float32: of layers.* (8), of its own forward`."""
    groups: dict[str, list[str]] = {}
    for name in writers:
        inner = relative(name, owner) if name != owner else ""
        groups.setdefault(pattern_of(inner), []).append(inner)
    what = request.mod.describe(len(writers), request.settings)
    if set(groups) == {""}:
        return what
    counted = [(common_pattern(names) or "its own forward", len(names)) for names in groups.values()]
    return f"{what}: of " + ", of ".join(f"{name} ({count})" if count > 1 else name for name, count in counted)


def check_apart(entries: Sequence[tuple[ModRule, Iterable[str]]]) -> None:
    """Raises PolicyError if two entries of one mod have a module in common; each comes with its modules."""
    problems = [each for place, (rule, names) in enumerate(entries) for each in conflicts(rule, names, entries[:place])]
    if problems:
        raise PolicyError(problems)


def owner_problems(
    rule: ModRule, changed: Collection[str], left: Sequence[Unchanged], model: nn.Module, reason: str
) -> list[Problem]:
    """Problems of an entry: patterns without a match, named modules that are not changed, no change at all.

    `changed` are the modules that it changes, `left` those that it does not fully change, with reasons; `reason` is
    that of any other module.
    """
    modules = [name for name, _ in model.named_modules()]
    explained = {each.name for each in left}
    stay = [each for each in left if each.name not in changed]
    stay += [Unchanged(name, reason) for name in modules if rule.names(name) and name not in {*changed, *explained}]
    problems = unmatched_problems(rule, modules[1:], "module", lambda pattern: any(map(pattern.matches, modules)))
    problems += named_problems(rule, stay)
    if problems or changed:
        return problems
    if not stay and rule.match:
        stay = [Unchanged(name, reason) for name in modules if rule.wants(name)][:1]
    return idle_problems(rule, stay, [each.name for each in stay])
