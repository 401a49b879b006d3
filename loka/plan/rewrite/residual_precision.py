"""Tracing owners whose residual sums `residual_high_precision` carries, and what is wrong where there are none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from loka.graph.equivalence import rounding_difference
from loka.graph.ir import ForwardIR
from loka.graph.patterns.region import RegionScope
from loka.graph.refused import CannotTraceError, Refused
from loka.graph.trace.observed_shapes import observed_shapes
from loka.graph.trace.trace import copy_owner, expanded, with_findings
from loka.mods.adaptation import Unchanged
from loka.mods.residual_high_precision import NAME, NO_SUM, CarriedResidual, carry
from loka.mods.residual_streams import ResidualStream, is_under, residual_streams
from loka.mods.rewrite_result import RewriteResult
from loka.plan.report.plan_rows import common_pattern, pattern_of
from loka.plan.rewrite.owner_rules import check_apart, owner_problems, rules_of
from loka.plan.rewrite.rewriting_tracer import RewritingTracer, relative
from loka.policy.policy import ModRule, Policy
from loka.policy.problems import PolicyError, Problem


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What one entry of `mods` asks for."""

    rule: ModRule
    streams: tuple[ResidualStream, ...]

    @property
    def dtype(self) -> str:
        """What sums are carried in."""
        return str(dict(self.rule.settings)["dtype"])

    def means(self, writer: str) -> bool:
        """Whether the sums that a module's forward writes are meant."""
        if any(pattern.matches(writer) for pattern in self.rule.except_):
            return False
        return any(is_under(writer, stream.owner) for stream in self.streams)


def requested_streams(policy: Policy, model: nn.Module) -> tuple[StreamRequest, ...]:
    """What the policy's entries ask for. Raises PolicyError where two ask for one module, naming both."""
    found = tuple(StreamRequest(rule, residual_streams(model, rule.wants)) for rule in rules_of(policy, NAME))
    check_apart([(asked.rule, [writer for writer in _writers(asked) if asked.means(writer)]) for asked in found])
    return found


def _writers(asked: StreamRequest) -> list[str]:
    return [writer for stream in asked.streams for writer in stream.writers]


@dataclass(slots=True)
class ResidualTracer:
    """Traces owners, with mods' changes made, and carries residual sums in what comes back."""

    tracer: RewritingTracer
    asked: tuple[StreamRequest, ...]
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)  # scope's owner -> the writer of each sum
    reasons: dict[str, str] = field(default_factory=dict)  # scope's owner -> why none of its sums is carried
    _made: dict[object, tuple[ForwardIR, tuple[str, ...]] | str] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[ResidualStream, ...]:
        """All that is asked for."""
        return tuple(stream for asked in self.asked for stream in asked.streams)

    def capture(self, owners: Collection[str]) -> None:
        """Run the model to see how it calls some modules."""
        self.tracer.capture(owners)

    def __call__(self, scope: RegionScope) -> ForwardIR | Refused:
        """The forward of one owner, or why not."""
        forward = self.tracer(scope)
        if isinstance(forward, Refused):
            return forward
        self.sums[scope.owner] = ()
        for asked in self.asked:
            meant = tuple(asked.means(_writer(forward, place)) for place in range(len(forward.statements)))
            if not any(meant):
                continue
            key = (replace(forward, owner=""), asked.dtype, meant)
            if key not in self._made:
                self._made[key] = self._carried(scope, forward, asked)
            made = self._made[key]
            if isinstance(made, str):
                self.reasons[scope.owner] = made
                continue
            forward = replace(made[0], owner=scope.owner)
            self.sums[scope.owner] += tuple(".".join(filter(None, (scope.owner, writer))) for writer in made[1])
        return forward

    def _carried(
        self, scope: RegionScope, forward: ForwardIR, asked: StreamRequest
    ) -> tuple[ForwardIR, tuple[str, ...]] | str:
        """The forward with its sums carried, checked against the module's own, and the writers; or why not."""
        module = self.tracer.tracer.model.get_submodule(scope.owner)
        examples = self.tracer.tracer.examples(scope.owner)
        inside = expanded(module, scope.inline, scope.sites)

        def copied() -> nn.Module:
            return copy_owner(module, inside)

        found = carry(forward, asked.dtype, asked.means)
        if not isinstance(found, CarriedResidual):
            return found
        try:
            different = rounding_difference(module, found.forward, examples, copied)
            if different is not None:
                return different
            shapes = observed_shapes(found.forward, examples, copied)
        except CannotTraceError as error:
            return str(error)
        notes = {statement.target: statement.note for statement in forward.statements}
        return with_findings(replace(found.forward, rewritten=(*forward.rewritten, NAME)), shapes), tuple(
            notes[name] for name in found.sums
        )


@dataclass(frozen=True, slots=True)
class ResidualStreams:
    """What came of one entry: the changes, by the owner whose forward has them, and what stays and why."""

    rewritten: tuple[RewriteResult, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    writers: frozenset[str] = frozenset()  # the modules whose forwards write the sums that are carried


def check_residual_streams(
    tracer: ResidualTracer, owners: Collection[str], refused: Mapping[str, str], model: nn.Module
) -> dict[str, ResidualStreams]:
    """What came of each entry, by its `source`.

    Raises PolicyError for entries that carry no sum, and for modules that they name and whose sums stay.
    """
    found = {asked.rule.source: residual_streams_of(asked, tracer, owners, refused) for asked in tracer.asked}
    problems: list[Problem] = []
    for asked in tracer.asked:
        made = found[asked.rule.source]
        left = {each.name for each in made.unchanged}
        done = [writer for writer in made.writers if asked.means(writer)]
        changed = {name for name, _ in model.named_modules() if any(is_under(writer, name) for writer in done)} - left
        problems += owner_problems(asked.rule, changed, made.unchanged, model, NO_SUM)
    if problems:
        raise PolicyError(problems)
    return found


def residual_streams_of(
    asked: StreamRequest, tracer: ResidualTracer, owners: Iterable[str], refused: Mapping[str, str]
) -> ResidualStreams:
    """What came of one entry in the forwards that the plan has, those of `owners`; `refused` could not be traced."""
    rewritten = []
    done: set[str] = set()
    for owner in owners:
        writers = [writer for writer in tracer.sums.get(owner, ()) if asked.means(writer)]
        if writers:
            done.update(writers)
            rewritten.append(RewriteResult(NAME, owner, (), "", _what(owner, writers, asked.dtype)))
    reasons = {**tracer.reasons, **refused}
    left = [
        Unchanged(stream.owner, reasons.get(stream.owner, NO_SUM))
        for stream in asked.streams
        if stream.owner in reasons or not any(is_under(writer, stream.owner) for writer in done)
    ]
    return ResidualStreams(tuple(rewritten), tuple(left), frozenset(done))


def _what(owner: str, writers: Collection[str], dtype: str) -> str:
    """What is carried, without the owner's name: `9 residual sums in float32: of layers.* (8), of its own forward`."""
    groups: dict[str, list[str]] = {}
    for name in writers:
        inner = relative(name, owner) if name != owner else ""
        groups.setdefault(pattern_of(inner), []).append(inner)
    what = f"{len(writers)} residual sum{'s' if len(writers) > 1 else ''} in {dtype}"
    if set(groups) == {""}:
        return what
    told = [(common_pattern(names) or "its own forward", len(names)) for names in groups.values()]
    return f"{what}: of " + ", of ".join(f"{name} ({count})" if count > 1 else name for name, count in told)


def _writer(forward: ForwardIR, place: int) -> str:
    return ".".join(filter(None, (forward.owner, forward.statements[place].note)))
