"""A policy that was read and is well-formed: the result of `loka.policy.load.read_policy`."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from loka.devices.spec import Execution
from loka.errors import Code
from loka.policy.checks import REGEX_PREFIX, compile_pattern
from loka.policy.problems import Place, PolicyError, Problem
from loka.policy.settings import Assignment, SiteFacts
from loka.policy.tree import Node, node_at

if TYPE_CHECKING:
    from loka.policy.communication import ExchangeSetting
    from loka.policy.policy_schema import TrainSetting

GATHER = "gather"  # the leaf that `communication.weights` sets
OPERAND_FIELDS = ("format", "scaling", "range", "amax", "power_of_two")  # the leaves of one operand
MATCHING_SECONDS = 1.0  # limit for matching one name; a pattern that does not backtrack needs microseconds
ModParameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The callables that build the model, each "package.module:name"."""

    factory: str
    inputs: str | None
    batch_size: int  # samples per step
    batches: str | None = None  # of training: their first inputs are the example where nothing else gives one


RECOMMENDED_EXECUTION = Execution.REDUCE_OVERHEAD  # measured first, and where a policy says nothing


@dataclass(frozen=True, slots=True)
class ExecutionSpec:
    """How the model runs, and what a step takes besides the sites of the plan, in milliseconds."""

    mode: Execution
    host_ms: float
    gpu_ms: float


@dataclass(frozen=True, slots=True)
class Pattern:
    """A glob over names, or "re:" and a regular expression for the whole name."""

    text: str
    place: Place
    compiled: re.Pattern[str] = field(repr=False)

    @classmethod
    def of(cls, text: str, place: Place) -> Pattern:
        """Compiles the pattern, which is valid."""
        return cls(text, place, compile_pattern(text))

    def matches(self, name: str) -> bool:
        """True if a fully qualified name matches, case-sensitively. Raises PolicyError if matching takes too long."""
        if not self.text.startswith(REGEX_PREFIX):
            return self.compiled.fullmatch(name) is not None  # a glob does not backtrack
        try:
            with _bounded(MATCHING_SECONDS):
                return self.compiled.fullmatch(name) is not None
        except _TooLongError:
            message = (
                f"matching {self.compiled.pattern!r} takes over {MATCHING_SECONDS:g} s on {len(name)} characters; "
                "take out a repeat within a repeat, as in (a+)+, or use a glob"
            )
            raise PolicyError([Problem(self.place, message, Code.SLOW_PATTERN)]) from None


class _TooLongError(Exception):
    pass


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise _TooLongError in the block after a time. Other threads than the main one, and Windows, have no bound."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restore another timer
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)


@dataclass(frozen=True, slots=True)
class SizeBound:
    """A range for one property of a site, ends included; None for an open end."""

    field: str  # m | k | n | share
    least: float | None
    largest: float | None

    def holds(self, facts: SiteFacts) -> bool:
        """True if the site's value is in the range."""
        value: float = getattr(facts, self.field)
        return (self.least is None or value >= self.least) and (self.largest is None or value <= self.largest)


@dataclass(frozen=True, slots=True)
class Match:
    """The sites of a rule: any of the patterns, and the kind, and every bound. Empty: every site."""

    text: str  # as shown: "layers.*.mlp.*", "kind: linear, max_n: 16"
    patterns: tuple[Pattern, ...] = ()
    kind: str | None = None
    bounds: tuple[SizeBound, ...] = ()

    def matches(self, facts: SiteFacts) -> bool:
        """True if a site matches."""
        if self.kind is not None and facts.kind != self.kind:
            return False
        if not all(bound.holds(facts) for bound in self.bounds):
            return False
        return not self.patterns or any(pattern.matches(facts.name) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the settings and the value that one rule gives it.

    Leaves: GEMM.compute, .accumulation, .padding; GEMM.OPERAND.format, .scaling, .range, .amax, .power_of_two;
    GEMM.kernel and GEMM.OPERAND.requantize_transpose, which exist only if a rule sets them; budget.mere, .sqnr_db,
    .min_speedup; fuse; scaling, which exists only if a rule sets it to auto; gather, by
    `communication.weights` alone.
    """

    assignment: Assignment
    value: object  # of the leaf's type in `settings`
    column: int  # 1-based; 0 for built-in values


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, expanded into leaves, broad before narrow."""

    match: Match
    optional: bool  # it may match nothing
    note: str | None
    source: str  # "defaults", or "rule 2: layers.*.mlp.*"; the rules of a base are numbered first
    place: Place  # line 0 for the built-in rule
    leaves: tuple[Leaf, ...]

    def naming_one_site(self) -> Rule:
        """The same rule with its assignments marked: if the site cannot comply, that is an error."""
        leaves = (replace(leaf, assignment=replace(leaf.assignment, names_one_site=True)) for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))


@dataclass(frozen=True, slots=True)
class ModRule:
    """One entry of `mods`, or a mod that is planned without being asked for where it wins."""

    use: str  # the mod's name
    match: tuple[Pattern, ...]  # over modules, sites or owners, depending on the mod; empty: everything
    except_: tuple[Pattern, ...]
    settings: tuple[tuple[str, ModParameter], ...]  # values of all of the mod's parameters
    optional: bool  # it may find nothing to change
    note: str | None
    source: (
        str  # "mod 2: block_norm"; the mods of a base are numbered first. "auto: merge_siblings" if it was not asked
    )
    place: Place
    asked: bool = True  # False: not by the policy; it is planned only where predicted times say that it wins

    def wants(self, name: str) -> bool:
        """True if a qualified name is matched and not excepted."""
        if any(pattern.matches(name) for pattern in self.except_):
            return False
        return not self.match or any(pattern.matches(name) for pattern in self.match)

    def names(self, name: str) -> bool:
        """True if a pattern without a wildcard names it: then it is an error if the mod cannot change it."""
        return self.wants(name) and any(pattern.text == name for pattern in self.match)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with its bases merged in. `rules` begins with the defaults, as a rule for every site."""

    version: int
    name: str  # an identifier; also the name of the generated package
    path: Path  # as named by the user
    # (path relative to the policy's directory, sha256 of its values but for `train`): the policy, then its bases
    files: tuple[tuple[str, str], ...]
    model: ModelSpec
    train: TrainSetting | None
    target: str  # the name of a device (`loka.devices.targets`)
    rules: tuple[Rule, ...]
    mods: tuple[ModRule, ...] = ()
    units: tuple[Pattern, ...] = ()  # over modules that FSDP shards one by one
    gathers: tuple[Rule, ...] = ()  # what FSDP's all-gathers carry: each sets the leaf GATHER, after all of `rules`
    exchange: ExchangeSetting | None = None  # what TorchRec's carry; None: TorchRec's to say
    auto_mods: bool = False  # exact mods are planned where they win, without being asked for
    profile: str | None = None
    measurements: str | None = None
    execution: ExecutionSpec | None = None
    ne_percent: float | None = None  # the largest predicted change of NE by the whole plan; None: no limit
    tree: Node = field(default=Node(Place("", 0, 0), Place("", 0, 0)), repr=False, compare=False)
    named: tuple[str, ...] = ()  # the files as named in messages, in the order of `files`

    def without_mod(self, source: str) -> Policy:
        """The policy without one entry of `mods`, by its `source`."""
        return replace(self, mods=tuple(rule for rule in self.mods if rule.source != source))

    @property
    def measured_execution(self) -> Execution:
        """How `loka tune` runs its steps: as `execution` says, otherwise as is recommended."""
        return self.execution.mode if self.execution is not None else RECOMMENDED_EXECUTION

    @property
    def profile_name(self) -> str | None:
        """The `profile` as written; without one, profiles/NAME.safetensors beside the policy if that exists."""
        if self.profile is not None:
            return self.profile
        return self.default_profile if (self.path.parent / self.default_profile).is_file() else None

    @property
    def default_profile(self) -> str:
        """Where `loka probe` writes if the policy names no profile, relative to the policy."""
        return f"profiles/{self.name}.safetensors"

    @property
    def profile_file(self) -> Path | None:
        """Path of the profile, named relative to the file that names it or at its default place; None without one."""
        if self.profile is None:
            return None if self.profile_name is None else self.path.parent / self.profile_name
        return self._file("profile", self.profile)

    @property
    def tuned_name(self) -> str:
        """The place of the record of `loka tune`, relative to the policy."""
        return f"profiles/{self.name}.tuned.json"

    @property
    def tuned_file(self) -> Path:
        """Path of that record, which need not exist."""
        return self.path.parent / self.tuned_name

    @property
    def measurements_file(self) -> Path | None:
        """Path of the `measurements`, resolved relative to the file that names it; None if the policy names none."""
        return self._file("measurements", self.measurements)

    def _file(self, field: str, named: str | None) -> Path | None:
        if named is None:
            return None
        file = node_at(self.tree, (field,)).place.file
        return (Path(file).parent if file else self.path.parent) / named

    def where(self, dotted: str) -> str:
        """The `file:line:column` of a field such as "model.factory" or "rules.0.match"; of its parent if left out.

        Rules count from 0 without the defaults: "rules.0" is `rules[1]`, and "mods.0" is `mods[0]`.
        """
        steps = [int(step) if step.isdigit() else step for step in dotted.split(".")]
        return str(node_at(self.tree, steps).place)

    def relative(self, file: str) -> str:
        """A file of an `Assignment.file` with its name in `files`: the same on every machine."""
        return self.files[self.named.index(file)][0] if file in self.named else file
