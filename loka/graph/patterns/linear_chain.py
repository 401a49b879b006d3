"""Linear chains: runs of regions, each linear [* matrix] [+ matrix] [norm] [activation] [* matrix].

Before the first linear there may be a norm, or [norm] [activation] * matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.expression import PRODUCT, Call, Ref, RefKind, locals_in, refs_in
from loka.graph.ir import DTYPE, LEAKY_RELU, Dropout, ForwardIR, Region, Statement, is_slope
from loka.graph.patterns.norm import (
    BATCH_NORM,
    TORCH_NORMS,
    ChainNorm,
    NormRun,
    norm_ending_at,
    norm_starting_at,
)


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One linear of a chain, with the operations around it.

    Only a chain's first stage has something before its linear, whose input is the value computed just before it.
    """

    site: str
    linear: int  # the GEMM's index in `ForwardIR.statements`
    before: ChainNorm | None = None
    before_activation: str | None = None
    before_multiplier: Ref | None = None  # factor of what these give: a local from outside the chain
    after: ChainNorm | None = None
    activation: str | None = None  # "silu", "leaky_relu(0.2)"; "gate_sigmoid" multiplies the input of the norm `after`
    multiplier: Ref | None = None  # factor of the result of a norm or an activation: a local from outside the chain
    dropout: Dropout | None = None  # of that
    times: Ref | None = None  # factor of the linear's result: a local from outside the chain
    residual: Ref | None = None  # added after that: a local from outside, or an earlier stage's result


@dataclass(frozen=True, slots=True)
class LinearChain:
    """Consecutive stages, each of which but the last is read only by the next one and at most one later residual.

    `first` and `last` index `ForwardIR.statements`.
    """

    first: int
    last: int
    stages: tuple[ChainStage, ...]


@dataclass(frozen=True, slots=True)
class StaticOperands:
    """The operations that the kernels of a chain support around its linears."""

    norms: frozenset[str]
    activations: frozenset[str]
    largest_block: int = 2**14  # of a block_norm, and the columns of a batch_norm, a dropout or a product after a norm


def find_chains(
    forward: ForwardIR,
    regions: Sequence[Region],
    known: StaticOperands,
    alike: Callable[[str, str], bool] = lambda site, other: True,
    sums: Callable[[str], bool] = lambda site: True,
) -> tuple[LinearChain, ...]:
    """The chains in a forward's regions, in the order of the statements.

    `regions` are the candidates, in order; a region of one statement is just a linear. A chain takes the part of a
    region that has the form linear [* matrix] [+ matrix] [norm] [activation] [* matrix] with operations in `known`, and
    a head before it (`ChainHead`); the rest of the region stays outside and ends the chain. The matrices are locals of
    the result's shape (`Statement.even`); those right after a linear are taken only for sites where `sums` is true, and
    the second of these may be the result of an earlier stage, if that was a sum too and its only other reader is the
    next linear. A norm at a region's end that its chain did not take goes before the next region's linear, if that is
    its only reader. A chain ends before a linear or norm whose weight or bias is computed inside the chain, before a
    site that is not `alike` the previous one, and before one that reads a Parameter which the chain already reads. A
    linear whose operand is a view starts a chain; one whose product is permuted is a chain of one.
    """
    finder = _Finder(forward, regions, known, sums)
    found = [chain for region in regions if (chain := finder.stage(region)) is not None]
    return tuple(_joined(forward, found, alike))


@dataclass(frozen=True, slots=True)
class ChainHead:
    """A norm, or [norm] [activation] * matrix, just before a linear; each step is read by the next alone."""

    first: int  # indexes `ForwardIR.statements`
    run: NormRun | None
    activation: str | None
    multiplier: Ref | None


def head_before(
    statements: Sequence[Statement], readers: Mapping[str, set[int]], linear: int, free: int
) -> ChainHead | None:
    """The head before a linear, of statements from `free` on; None without one."""

    def leads_on(place: int) -> bool:
        return place >= free and readers.get(statements[place].target) == {place + 1}

    place = linear - 1
    if not leads_on(place) or _input(statements[linear]) != statements[place].target:
        return None
    multiplier, activation = None, None
    if leads_on(place - 1):
        multiplier = _other(statements[place], "mul", statements[place - 1].target)
    if multiplier is not None:
        place -= 1
        activation = _activation(statements[place])
    if activation is not None:
        source = statements[place].operands[0]
        before = place - 1
        of_norm = leads_on(before) and source.text == statements[before].target
        if not of_norm or norm_ending_at(statements, before) is None:
            return None if multiplier == source else ChainHead(place, None, activation, multiplier)
        place = before
    run = norm_ending_at(statements, place)
    if run is None or run.first < free or (multiplier is not None and multiplier.text == run.source):
        return None
    return ChainHead(run.first, run, activation, multiplier)


class _Finder:
    """Finds chains of one stage, region by region."""

    def __init__(
        self,
        forward: ForwardIR,
        regions: Sequence[Region],
        known: StaticOperands,
        sums: Callable[[str], bool],
    ) -> None:
        self._statements = forward.statements
        self._readers = readers_of(forward)
        self._known, self._sums = known, sums
        self._wanted = {place for region in regions for place in range(region.first, region.last + 1)}
        self._free = 0  # the first statement not yet in a chain

    def stage(self, region: Region) -> LinearChain | None:
        """A region as a chain of one; None where its GEMM is in another chain already."""
        statements = self._statements
        places = [n for n in range(region.first, region.last + 1) if statements[n].call is not None]
        if not places or places[0] < self._free:
            return None
        linear = places[0]
        head = self._head(linear) or ChainHead(linear, None, None, None)
        first, last = head.first, linear
        norm = head.run.norm if head.run is not None else None
        stage = ChainStage(region.site, linear, norm, head.activation, head.multiplier)
        call = statements[linear].call
        if call is not None and call.out == PRODUCT:
            last, stage = self._follow(first, region.last, stage)
        self._free = last + 1
        return LinearChain(first, last, (stage,))

    def _head(self, linear: int) -> ChainHead | None:
        """What stands before a linear, where kernels take it."""
        head = head_before(self._statements, self._readers, linear, self._free)
        if head is None or (head.run is not None and not self._takes(head.run)):
            return None
        norm = head.run.norm if head.run is not None else None
        if head.multiplier is None:
            return None if norm is not None and norm.kind == BATCH_NORM else head
        wanted = self._wanted.issuperset(range(head.first, linear))
        known = head.activation is None or self._statements[linear - 2].op in self._known.activations
        return head if wanted and known and self._multiplies(linear - 1, norm) else None

    def _multiplies(self, product: int, norm: ChainNorm | None) -> bool:
        """True if a kernel multiplies what an activation or this norm gives by a matrix of so many columns."""
        held = 0 < (self._statements[product].columns or 0) <= self._known.largest_block
        return held and (norm is None or norm.kind in TORCH_NORMS)

    def _follow(self, first: int, end: int, stage: ChainStage) -> tuple[int, ChainStage]:
        """The last statement of the chain after its linear, and the stage with the operations found there."""
        last, after, activation = stage.linear, None, None
        inside = {self._statements[n].target for n in range(first, last + 1)}
        found: dict[str, Ref | None] = {"mul": None, "add": None}
        for op in found if self._sums(stage.site) else ():
            if last < end and self._goes_on(last, last + 1, inside):
                found[op] = _other(self._statements[last + 1], op, self._statements[last].target)
                if found[op] is not None:
                    last += 1
                    inside.add(self._statements[last].target)
        run = norm_starting_at(self._statements, last + 1) if last < end else None
        if run is not None and self._reads_again(first, last, run):
            run = None
        if run is not None and run.norm.kind == BATCH_NORM and last > stage.linear:
            run = None  # its kernels take the product itself
        gate = self._gate(last, run, end, inside) if run is not None else None
        if run is not None and gate is not None:
            gated = replace(stage, after=run.norm, activation=gate, times=found["mul"], residual=found["add"])
            return run.last + 2, gated
        if run is not None and run.last <= end and self._takes(run) and self._goes_on(last, run.last, inside):
            last, after = run.last, run.norm
            inside.update(self._statements[place].target for place in range(run.first, run.last + 1))
        if last < end and self._goes_on(last, last + 1, inside):
            following = self._statements[last + 1]
            activation = _activation(following) if following.op in self._known.activations else None
            last += activation is not None
            inside.add(self._statements[last].target)
        made = replace(stage, after=after, activation=activation, times=found["mul"], residual=found["add"])
        return self._follow_bent(last, end, made, inside) if after or activation else (last, made)

    def _follow_bent(self, last: int, end: int, stage: ChainStage, inside: set[str]) -> tuple[int, ChainStage]:
        """`_follow` after the norm or activation at `last`: a product with a matrix, and a dropout."""
        multiplier = None
        if last < end and self._goes_on(last, last + 1, inside) and self._multiplies(last + 1, stage.after):
            multiplier = _other(self._statements[last + 1], "mul", self._statements[last].target)
            last += multiplier is not None
            inside.add(self._statements[last].target)
        dropout = self._statements[last + 1].called if last < end else None
        if not isinstance(dropout, Dropout) or not 0 < dropout.columns <= self._known.largest_block:
            return last, replace(stage, multiplier=multiplier)
        if not self._goes_on(last, last + 1, inside):
            return last, replace(stage, multiplier=multiplier)
        return last + 1, replace(stage, multiplier=multiplier, dropout=dropout)

    def _reads_again(self, first: int, last: int, run: NormRun) -> bool:
        return bool(_parameters(self._statements, first, last) & _parameters(self._statements, run.first, run.last))

    def _gate(self, last: int, run: NormRun, end: int, inside: Collection[str]) -> str | None:
        """ "gate_sigmoid" for y * sigmoid(norm(y)), the norm's statements and the two after it; None otherwise.

        Nothing else may read the intermediate values.
        """
        if run.norm.kind == BATCH_NORM or run.last + 2 > end:
            return None
        if not self._takes(run) or not self._goes_on(last, run.last + 2, inside):
            return None
        act, product = self._statements[run.last + 1], self._statements[run.last + 2]
        normed, taken = self._statements[run.last].target, self._statements[last].target
        read = [self._readers.get(target) for target in (normed, act.target)]
        alone = read == [{run.last + 1}, {run.last + 2}] and act.operands[0].text == normed
        gate = f"gate_{act.op}"
        if not alone or gate not in self._known.activations or _activation(act) != act.op:
            return None
        factors = pair_of(product, "mul") or ()
        return gate if {ref.text for ref in factors} == {taken, act.target} else None

    def _goes_on(self, last: int, end: int, inside: Collection[str]) -> bool:
        """True if only the statements after `last` up to `end` read it, and they read nothing else of the chain."""
        span = range(last + 1, end + 1)
        refs = (ref for place in span for ref in self._statements[place].operands if ref.kind is RefKind.LOCAL)
        reads = [ref.text for ref in refs if ref.text in inside]
        target = self._statements[last].target
        once = reads == [target] or (end > last + 1 and set(reads) == {target})  # a gate multiplies it, too
        return once and self._readers.get(target, set()) <= set(span)

    def _takes(self, run: NormRun) -> bool:
        """True if a kernel supports a norm, and nothing else reads inside it."""
        places = set(range(run.first, run.last + 1))
        within = [self._statements[place].target for place in range(run.first, run.last)]
        if run.norm.kind not in self._known.norms or not places <= self._wanted:
            return False
        if any(not self._readers.get(target, set()) <= places for target in within):
            return False
        if run.norm.kind not in ("block_norm", BATCH_NORM):
            return True
        held = run.norm.width
        return (run.norm.kind == BATCH_NORM or held & (held - 1) == 0) and held <= self._known.largest_block


def _joined(
    forward: ForwardIR, chains: Sequence[LinearChain], alike: Callable[[str, str], bool]
) -> Iterator[LinearChain]:
    """Neighbouring chains joined where the first's result is read only by the second's first linear.

    A later residual of the same chain may read it as well.
    """
    readers = readers_of(forward)
    run: list[LinearChain] = []
    read = set[str]()
    for chain in chains:
        same = bool(run) and alike(run[-1].stages[-1].site, chain.stages[0].site)
        own = _parameters(forward.statements, chain.first, chain.last)
        if not (same and _follows(forward.statements, readers, run[-1], chain)) or own & read:
            yield from _closed_runs(forward.statements, readers, run)
            run, read = [], set()
        run.append(chain)
        read |= own
    yield from _closed_runs(forward.statements, readers, run)


def _parameters(statements: Sequence[Statement], first: int, last: int) -> set[str]:
    """Attributes that statements read. torch.compile rejects an autograd function with one tensor as two arguments."""
    refs = (ref for place in range(first, last + 1) for ref in statements[place].operands)
    return {ref.text for ref in refs if ref.kind is RefKind.ATTRIBUTE}


def _closed_runs(
    statements: Sequence[Statement], readers: dict[str, set[int]], run: Sequence[LinearChain]
) -> Iterator[LinearChain]:
    """The longest closed chains in a run of neighbours, from its start."""
    start = 0
    while start < len(run):
        end = len(run)
        while end > start + 1 and not _is_closed(statements, readers, run[start:end]):
            end -= 1
        stages = tuple(stage for chain in run[start:end] for stage in chain.stages)
        yield LinearChain(run[start].first, run[end - 1].last, stages)
        start = end


def _follows(
    statements: Sequence[Statement], readers: dict[str, set[int]], chain: LinearChain, following: LinearChain
) -> bool:
    """True if the first linear of `following` multiplies the result of `chain`."""
    if following.first != chain.last + 1 or following.first != following.stages[0].linear:
        return False
    target = statements[chain.last].target
    call = statements[chain.stages[-1].linear].call
    if following.first not in readers.get(target, set()) or call is None or call.out != PRODUCT:
        return False
    return _input(statements[following.first]) == target


def _is_closed(statements: Sequence[Statement], readers: dict[str, set[int]], run: Sequence[LinearChain]) -> bool:
    """True if every result but the last is read only by the run's next linear and at most one of its residuals."""
    ends = {statements[chain.last].target: index for index, chain in enumerate(run[:-1])}
    inside = {statements[n].target for n in range(run[0].first, run[-1].last + 1)}
    residuals = {place: ref for chain in run if (place := _residual_place(chain)) and (ref := chain.stages[0].residual)}
    for index, chain in enumerate(run):
        # A chain's reads of its own values were checked when it was found.
        others = inside - {statements[n].target for n in range(chain.first, chain.last + 1)}
        for place in range(chain.first, chain.last + 1):
            reads = [ref.text for ref in statements[place].operands if ref.kind is RefKind.LOCAL and ref.text in others]
            expected = [statements[place - 1].target] if place == chain.first and index else []
            added = residuals.get(place)
            if added is not None and added.text in inside:
                if not _ends_with_a_sum(run, ends.get(added.text), index):
                    return False
                expected.append(added.text)
            if sorted(reads) != sorted(expected):
                return False
    for target, index in ends.items():
        further = readers.get(target, set()) - {run[index + 1].first}
        if len(further) > 1 or any(place not in residuals or residuals[place].text != target for place in further):
            return False
    return True


def _ends_with_a_sum(run: Sequence[LinearChain], index: int | None, reader: int) -> bool:
    """True if a chain of the run before the reader ends with a sum, which a kernel writes out."""
    if index is None or index >= reader:
        return False
    stage = run[index].stages[-1]
    sums = stage.times is not None or stage.residual is not None
    return sums and stage.after is None and stage.activation is None


def _residual_place(chain: LinearChain) -> int | None:
    """Index of the statement that adds the residual of a chain of one."""
    stage = chain.stages[0]
    return None if stage.residual is None else stage.linear + 1 + (stage.times is not None)


def chain_input(forward: ForwardIR, chain: LinearChain) -> str | None:
    """The local that is a chain's input; None where the input is a view or an expression."""
    if chain.first == chain.stages[0].linear:
        return _input(forward.statements[chain.first])
    ref = forward.statements[chain.first].operands[0]
    return ref.text if ref.kind is RefKind.LOCAL else None


def residual_stage(forward: ForwardIR, chain: LinearChain, stage: ChainStage) -> int | None:
    """Index of the stage whose result is a stage's residual; None for a residual from outside the chain."""
    if stage.residual is None:
        return None
    linears = [other.linear for other in chain.stages]
    ends = [*(linear - 1 for linear in linears[1:]), chain.last]
    targets = [forward.statements[end].target for end in ends[: linears.index(stage.linear)]]
    return targets.index(stage.residual.text) if stage.residual.text in targets else None


def _input(statement: Statement) -> str | None:
    """The local that a linear multiplies directly; None where the operand is a view or an expression."""
    call = statement.call
    x = None if call is None else call.x
    if call is None or not isinstance(x, Ref) or x.kind is not RefKind.LOCAL:
        return None
    return None if x in refs_in(call.weight, call.bias) else x.text


def _other(statement: Statement, op: str, target: str) -> Ref | None:
    """The other matrix of a sum or product with `target`; None for another operation."""
    pair = pair_of(statement, op) if statement.even else None
    others = [ref for ref in pair or () if ref.text != target]
    return others[0] if len(others) == 1 and others[0].kind is RefKind.LOCAL else None


def pair_of(statement: Statement, op: str) -> tuple[Ref, Ref] | None:
    """x and y of `x + y` ("add") or `x * y` ("mul") in canonical form; None for another operation."""
    value = statement.value
    if not isinstance(value, Call) or value.target != f"operator.{op}" or statement.op != op:
        return None
    x, y = value.args
    return (x, y) if isinstance(x, Ref) and isinstance(y, Ref) else None


def _activation(statement: Statement) -> str | None:
    """The activation that a statement is of its operand, by torch's function of that name; None for another statement.

    A LeakyReLU with another slope than torch's own is "leaky_relu(0.2)".
    """
    value = statement.value
    functions = (f"torch.{statement.op}", f"torch.nn.functional.{statement.op}")
    if not isinstance(value, Call) or value.target not in functions or value.kwargs not in ((), (("inplace", False),)):
        return None
    if value.args == statement.operands[:1]:
        return statement.op
    slope = value.args[1] if statement.op == LEAKY_RELU and len(value.args) == 2 else None
    return f"{LEAKY_RELU}({slope})" if is_slope(slope) and value.args[:1] == statement.operands else None


def readers_of(forward: ForwardIR) -> dict[str, set[int]]:
    """The indices of the statements that read each local; the forward's result counts as one past the last.

    A target that is set twice has the readers of both, so that no chain contains it. A statement that reads only the
    dtype does not count: it does not need the tensor.
    """
    readers: dict[str, set[int]] = {}
    for index, statement in enumerate(forward.statements):
        for ref in statement.operands if statement.op != DTYPE else ():
            if ref.kind is RefKind.LOCAL:
                readers.setdefault(ref.text, set()).add(index)
    targets = {statement.target for statement in forward.statements}
    for target in targets.intersection(locals_in(forward.result)):
        readers.setdefault(target, set()).add(len(forward.statements))
    return readers
