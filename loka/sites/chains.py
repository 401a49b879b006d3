"""Chains: runs of regions, each [norm] linear [norm] [activation], that one generated function can take whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loka.sites.norms import ChainNorm, NormRun, arguments, literal, norm_ending_at, norm_starting_at, operand
from loka.sites.printer import names_in
from loka.sites.straight import RefKind, Region, SiteCall, Statement, StraightForward


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One linear of a chain, with what stands around it.

    `before` is there in a chain's first stage alone. The linear's input is what was computed just before it.
    """

    site: str
    linear: int  # the GEMM's place in `StraightForward.statements`
    before: ChainNorm | None = None
    after: ChainNorm | None = None
    activation: str | None = None  # "silu"


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive statements, each of which but the last is read by the next alone.

    `first` and `last` index `StraightForward.statements`.
    """

    first: int
    last: int
    stages: tuple[ChainStage, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What the kernels of a chain can do around its linears."""

    norms: frozenset[str]
    activations: frozenset[str]


def find_chains(
    forward: StraightForward,
    regions: Sequence[Region],
    known: Known,
    alike: Callable[[str, str], bool] = lambda site, other: True,
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[Chain, ...]:
    """The chains in a forward's regions, in the order of the statements.

    `regions` are those that may be rendered so, in order; a region of one statement is a linear alone. A chain takes
    the part of a region that has the form [norm] linear [norm] [activation] with operations in `known`; what follows in
    the region stays outside, and ends the chain. A norm at a region's end that its chain did not take goes before the
    next region's linear, if that alone reads it. A linear whose weight or bias, or a norm whose weight or bias, is
    computed inside the chain ends the chain before it, and so does a site that is not `alike` the one before. A linear
    whose operand is a view begins a chain, one whose product is permuted is a chain of one. `sizes` gives K and N of a
    site: without them, a block_norm is taken only where its statements show that the blocks divide the width.
    """
    finder = _Finder(forward, regions, known, sizes or {})
    found = [chain for region in regions if (chain := finder.stage(region)) is not None]
    return tuple(_joined(forward, found, alike))


class _Finder:
    """Chains of one stage, region by region."""

    def __init__(
        self,
        forward: StraightForward,
        regions: Sequence[Region],
        known: Known,
        sizes: Mapping[str, tuple[int, int]],
    ) -> None:
        self._sizes = sizes
        self._statements = forward.statements
        self._readers = readers_of(forward)
        self._known = known
        self._wanted = {place for region in regions for place in range(region.first, region.last + 1)}
        self._free = 0  # the first statement that no chain has taken

    def stage(self, region: Region) -> Chain | None:
        """A region as a chain of one; None where its GEMM is in another chain."""
        statements = self._statements
        places = [n for n in range(region.first, region.last + 1) if statements[n].call is not None]
        if not places or places[0] < self._free:
            return None
        linear = places[0]
        k, n = self._sizes.get(region.site, (0, 0))
        pre_norm = self._norm_before(linear, k)
        first, last, after, activation = pre_norm.first if pre_norm else linear, linear, None, None
        call = statements[linear].call
        if call is not None and call.out == "{0}":
            last, after, activation = self._follow(first, linear, region.last, n)
        self._free = last + 1
        before = pre_norm.norm if pre_norm else None
        return Chain(first, last, (ChainStage(region.site, linear, before, after, activation),))

    def _norm_before(self, linear: int, width: int) -> NormRun | None:
        """The norm just before a linear, if it feeds that alone and may be taken."""
        run = norm_ending_at(self._statements, linear - 1) if linear else None
        if run is None or run.first < self._free or not self._takes(run, width):
            return None
        target = self._statements[run.last].target
        if _input(self._statements[linear]) != target or self._readers.get(target) != {linear}:
            return None
        return run

    def _follow(self, first: int, linear: int, end: int, width: int) -> tuple[int, ChainNorm | None, str | None]:
        """How far the chain goes on after its linear: the last statement, the norm and the activation."""
        last, after, activation = linear, None, None
        inside = {self._statements[n].target for n in range(first, linear + 1)}
        run = norm_starting_at(self._statements, linear + 1) if linear < end else None
        if run is not None and run.last <= end and self._takes(run, width) and self._goes_on(last, run.last, inside):
            last, after = run.last, run.norm
            inside.update(self._statements[place].target for place in range(run.first, run.last + 1))
        if last < end and self._goes_on(last, last + 1, inside):
            activation = self._activation(last + 1)
            last += activation is not None
        return last, after, activation

    def _goes_on(self, last: int, end: int, inside: Collection[str]) -> bool:
        """Whether only the statements after `last` up to `end` read it, and these read nothing else of the chain."""
        span = range(last + 1, end + 1)
        refs = (ref for place in span for ref in self._statements[place].operands if ref.kind is RefKind.LOCAL)
        reads = [ref.text for ref in refs if ref.text in inside]
        target = self._statements[last].target
        once = reads == [target] or (end > last + 1 and set(reads) == {target})  # the views of a block_norm read it too
        return once and self._readers.get(target, set()) <= set(span)

    def _takes(self, run: NormRun, width: int) -> bool:
        """Whether a kernel takes a norm over a dimension of `width` (0: unknown), and nothing else reads inside it."""
        places = set(range(run.first, run.last + 1))
        within = [self._statements[place].target for place in range(run.first, run.last)]
        if run.norm.kind not in self._known.norms or not places <= self._wanted:
            return False
        if any(not self._readers.get(target, set()) <= places for target in within):
            return False
        block = run.norm.width
        divides = width % block == 0 if width else run.divides
        return run.norm.kind != "block_norm" or (divides and block & (block - 1) == 0)

    def _activation(self, place: int) -> str | None:
        statement = self._statements[place]
        return statement.op if statement.op in self._known.activations and _is_plain_activation(statement) else None


def _joined(forward: StraightForward, chains: Sequence[Chain], alike: Callable[[str, str], bool]) -> Iterator[Chain]:
    """Neighbouring chains as one where the first's result goes into the second's first linear alone."""
    readers = readers_of(forward)
    current: Chain | None = None
    for chain in chains:
        same = current is not None and alike(current.stages[-1].site, chain.stages[0].site)
        if current is not None and same and _continues(forward.statements, readers, current, chain):
            current = Chain(current.first, chain.last, (*current.stages, *chain.stages))
            continue
        if current is not None:
            yield current
        current = chain
    if current is not None:
        yield current


def _continues(statements: Sequence[Statement], readers: dict[str, set[int]], chain: Chain, following: Chain) -> bool:
    if following.first != chain.last + 1 or following.stages[0].before is not None:
        return False
    target = statements[chain.last].target
    call = statements[chain.stages[-1].linear].call
    if readers.get(target) != {following.first} or call is None or call.out != "{0}":
        return False
    inside = {statement.target for statement in statements[chain.first : chain.last + 1]}
    reads = [
        ref.text
        for statement in statements[following.first : following.last + 1]
        for ref in statement.operands
        if ref.kind is RefKind.LOCAL and ref.text in inside
    ]
    return reads == [target] and _input(statements[following.first]) == target


def _input(statement: Statement) -> str | None:
    """The local that a linear multiplies as it is; None where the operand is a view or an expression."""
    call = statement.call
    index = None if call is None else _placeholder(call.x)
    if index is None or index >= len(statement.operands):
        return None
    ref = statement.operands[index]
    elsewhere = _others(call) if call is not None else ""
    return ref.text if ref.kind is RefKind.LOCAL and f"{{{index}}}" not in elsewhere else None


def _others(call: SiteCall) -> str:
    return call.weight + (call.bias or "")


def _placeholder(template: str) -> int | None:
    """3 of "{3}"."""
    inner = template.removeprefix("{").removesuffix("}")
    return int(inner) if template == f"{{{inner}}}" and inner.isdecimal() else None


def _is_plain_activation(statement: Statement) -> bool:
    """Whether an activation is called with its operand alone; in place or not is one here, as nothing else reads it."""
    parsed = arguments(statement)
    if parsed is None or statement.call is not None or len(statement.operands) != 1:
        return False
    function, positional, named = parsed
    if not function.startswith("torch."):  # a method: operand_0.relu()
        return function == f"operand_0.{statement.op}" and not positional and not named
    harmless = {"inplace": (False, True), "approximate": ("none",)}
    plain = all(literal(value) in harmless.get(name, ()) for name, value in named.items())
    return plain and [operand(statement, node) for node in positional] == [statement.operands[0]]


def readers_of(forward: StraightForward) -> dict[str, set[int]]:
    """For each target, the statements that read it; the result counts as one past the last.

    A target that is set twice has the readers of both, so that no chain runs over it.
    """
    readers: dict[str, set[int]] = {}
    for index, statement in enumerate(forward.statements):
        for ref in statement.operands:
            if ref.kind is RefKind.LOCAL:
                readers.setdefault(ref.text, set()).add(index)
    targets = [statement.target for statement in forward.statements]
    for target in names_in(forward.result, targets):
        readers.setdefault(target, set()).add(len(targets))
    return readers
