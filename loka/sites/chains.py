"""Chains: runs of regions, each [norm] linear [* matrix] [+ matrix] [norm] [activation], that one function can take."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from loka.sites.printer import names_in
from loka.sites.straight import Ref, RefKind, Region, SiteCall, Statement, StraightForward

# How torch's norms over the last dimension are printed, and the names of their arguments in order.
_NORM_ARGUMENTS = {
    "torch.nn.functional.layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "torch.layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "torch.nn.functional.rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "torch.rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_PAIRS = {
    "mul": ("{0} * {1}", "torch.mul({0}, {1})", "{0}.mul({1})"),
    "add": ("{0} + {1}", "torch.add({0}, {1})", "{0}.add({1})"),
}
_LAYER_NORM_EPS = 1e-05  # torch's default; an rms_norm without eps takes one that depends on the dtype


@dataclass(frozen=True, slots=True)
class ChainNorm:
    """A norm over the last dimension, of `width` elements."""

    kind: str  # "layer_norm" or "rms_norm"
    width: int
    eps: float
    weight: Ref | None
    bias: Ref | None


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
    times: Ref | None = None  # what the linear's result is multiplied by: a local from outside the chain
    residual: Ref | None = None  # what is added then: a local from outside, or an earlier stage's result


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive statements, each of which but the last is read by the next alone, or by a later stage's residual too.

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
    sums: Callable[[str], bool] = lambda site: True,
) -> tuple[Chain, ...]:
    """The chains in a forward's regions, in the order of the statements.

    `regions` are those that may be rendered so, in order; a region of one statement is a linear alone. A chain
    takes the part of a region that has the form [norm] linear [* matrix] [+ matrix] [norm] [activation] with
    operations in `known`; what follows in the region stays outside, and ends the chain. The matrices are locals of
    the result's shape (`Statement.even`), and are taken after sites that `sums` agrees to; the second may be what
    an earlier stage ended with, if that was a sum too and is read elsewhere by the next linear alone. A norm at a
    region's end that its chain did not take goes before the next region's linear, if that alone reads it. A linear
    whose weight or bias, or a norm whose weight or bias, is computed inside the chain ends the chain before it, and
    so does a site that is not `alike` the one before. A linear whose operand is a view begins a chain, one whose
    product is permuted is a chain of one.
    """
    finder = _Finder(forward, regions, known, sums)
    found = [chain for region in regions if (chain := finder.stage(region)) is not None]
    return tuple(_joined(forward, found, alike))


class _Finder:
    """Chains of one stage, region by region."""

    def __init__(
        self, forward: StraightForward, regions: Sequence[Region], known: Known, sums: Callable[[str], bool]
    ) -> None:
        self._statements = forward.statements
        self._readers = readers_of(forward)
        self._known, self._sums = known, sums
        self._wanted = {place for region in regions for place in range(region.first, region.last + 1)}
        self._free = 0  # the first statement that no chain has taken

    def stage(self, region: Region) -> Chain | None:
        """A region as a chain of one; None where its GEMM is in another chain."""
        statements = self._statements
        places = [n for n in range(region.first, region.last + 1) if statements[n].call is not None]
        if not places or places[0] < self._free:
            return None
        linear = places[0]
        before = self._norm_before(linear)
        first, last = linear - (before is not None), linear
        stage = ChainStage(region.site, linear, before)
        call = statements[linear].call
        if call is not None and call.out == "{0}":
            last, stage = self._follow(first, region.last, stage)
        self._free = last + 1
        return Chain(first, last, (stage,))

    def _norm_before(self, linear: int) -> ChainNorm | None:
        """The norm just before a linear, if it feeds that alone and may be taken."""
        place = linear - 1
        if place < self._free or place not in self._wanted:
            return None
        target = self._statements[place].target
        if _input(self._statements[linear]) != target or self._readers.get(target) != {linear}:
            return None
        return self._norm(place)

    def _follow(self, first: int, end: int, stage: ChainStage) -> tuple[int, ChainStage]:
        """How far the chain goes on after its linear: the last statement, and the stage with what follows."""
        last, after, activation = stage.linear, None, None
        inside = {self._statements[n].target for n in range(first, last + 1)}
        found: dict[str, Ref | None] = {"mul": None, "add": None}
        for op in found if self._sums(stage.site) else ():
            if last < end and self._goes_on(last, inside):
                found[op] = _other(self._statements[last + 1], op, self._statements[last].target)
                if found[op] is not None:
                    last += 1
                    inside.add(self._statements[last].target)
        if last < end and self._goes_on(last, inside):
            after = self._norm(last + 1)
            if after is not None:
                last += 1
                inside.add(self._statements[last].target)
        if last < end and self._goes_on(last, inside):
            activation = self._activation(last + 1)
            last += activation is not None
        return last, replace(stage, after=after, activation=activation, times=found["mul"], residual=found["add"])

    def _goes_on(self, last: int, inside: Collection[str]) -> bool:
        """Whether the statement after `last` is the only one that reads it, and reads nothing else of the chain."""
        following = self._statements[last + 1]
        reads = [ref.text for ref in following.operands if ref.kind is RefKind.LOCAL]
        target = self._statements[last].target
        return self._readers.get(target) == {last + 1} and [name for name in reads if name in inside] == [target]

    def _norm(self, place: int) -> ChainNorm | None:
        norm = parse_norm(self._statements[place])
        return norm if norm is not None and norm.kind in self._known.norms else None

    def _activation(self, place: int) -> str | None:
        statement = self._statements[place]
        return statement.op if statement.op in self._known.activations and _is_plain_activation(statement) else None


def _joined(forward: StraightForward, chains: Sequence[Chain], alike: Callable[[str, str], bool]) -> Iterator[Chain]:
    """Neighbouring chains as one where the first's result goes into the second's first linear, and no further.

    A later residual of the same chain may read it as well.
    """
    readers = readers_of(forward)
    run: list[Chain] = []
    for chain in chains:
        same = bool(run) and alike(run[-1].stages[-1].site, chain.stages[0].site)
        if not (same and _follows(forward.statements, readers, run[-1], chain)):
            yield from _closed_runs(forward.statements, readers, run)
            run = []
        run.append(chain)
    yield from _closed_runs(forward.statements, readers, run)


def _closed_runs(
    statements: Sequence[Statement], readers: dict[str, set[int]], run: Sequence[Chain]
) -> Iterator[Chain]:
    """The longest chains that a run of neighbours makes, from its start on."""
    start = 0
    while start < len(run):
        end = len(run)
        while end > start + 1 and not _is_closed(statements, readers, run[start:end]):
            end -= 1
        stages = tuple(stage for chain in run[start:end] for stage in chain.stages)
        yield Chain(run[start].first, run[end - 1].last, stages)
        start = end


def _follows(statements: Sequence[Statement], readers: dict[str, set[int]], chain: Chain, following: Chain) -> bool:
    """Whether the first linear of a chain multiplies what the chain before it ended with."""
    if following.first != chain.last + 1 or following.stages[0].before is not None:
        return False
    target = statements[chain.last].target
    call = statements[chain.stages[-1].linear].call
    if following.first not in readers.get(target, set()) or call is None or call.out != "{0}":
        return False
    return _input(statements[following.first]) == target


def _is_closed(statements: Sequence[Statement], readers: dict[str, set[int]], run: Sequence[Chain]) -> bool:
    """Whether what a run of chains ended with is read by the next linear, and by one residual at most, of the run."""
    ends = {statements[chain.last].target: index for index, chain in enumerate(run[:-1])}
    inside = {statements[n].target for n in range(run[0].first, run[-1].last + 1)}
    residuals = {place: ref for chain in run if (place := _residual_place(chain)) and (ref := chain.stages[0].residual)}
    for index, chain in enumerate(run):
        for place in range(chain.first, chain.last + 1):
            reads = [ref.text for ref in statements[place].operands if ref.kind is RefKind.LOCAL and ref.text in inside]
            previous = statements[place - 1].target
            expected = [previous] if place > run[0].first else []
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


def _ends_with_a_sum(run: Sequence[Chain], index: int | None, reader: int) -> bool:
    """Whether a chain of the run before the reader ends with the sum that a kernel keeps."""
    if index is None or index >= reader:
        return False
    stage = run[index].stages[-1]
    sums = stage.times is not None or stage.residual is not None
    return sums and stage.after is None and stage.activation is None


def _residual_place(chain: Chain) -> int | None:
    """The statement that adds the residual of a chain of one."""
    stage = chain.stages[0]
    return None if stage.residual is None else stage.linear + 1 + (stage.times is not None)


def chain_input(forward: StraightForward, chain: Chain) -> str | None:
    """The local that a chain takes as it is; None where it takes a view or an expression."""
    if chain.stages[0].before is None:
        return _input(forward.statements[chain.first])
    ref = forward.statements[chain.first].operands[0]
    return ref.text if ref.kind is RefKind.LOCAL else None


def residual_stage(forward: StraightForward, chain: Chain, stage: ChainStage) -> int | None:
    """The number of the stage whose result a stage's residual is; None for one from outside the chain."""
    if stage.residual is None:
        return None
    linears = [other.linear for other in chain.stages]
    ends = [*(linear - 1 for linear in linears[1:]), chain.last]
    targets = [forward.statements[end].target for end in ends[: linears.index(stage.linear)]]
    return targets.index(stage.residual.text) if stage.residual.text in targets else None


def _input(statement: Statement) -> str | None:
    """The local that a linear multiplies as it is; None where the operand is a view or an expression."""
    call = statement.call
    index = None if call is None else _placeholder(call.x)
    if index is None or index >= len(statement.operands):
        return None
    ref = statement.operands[index]
    elsewhere = _others(call) if call is not None else ""
    return ref.text if ref.kind is RefKind.LOCAL and f"{{{index}}}" not in elsewhere else None


def _other(statement: Statement, op: str, target: str) -> Ref | None:
    """The matrix that a sum or product takes beside `target`; None where it is another operation."""
    if statement.op != op or not statement.even or statement.template not in _PAIRS[op]:
        return None
    others = [ref for ref in statement.operands if ref.text != target]
    return others[0] if len(others) == 1 and others[0].kind is RefKind.LOCAL else None


def _others(call: SiteCall) -> str:
    return call.weight + (call.bias or "")


def _placeholder(template: str) -> int | None:
    """3 of "{3}"."""
    inner = template.removeprefix("{").removesuffix("}")
    return int(inner) if template == f"{{{inner}}}" and inner.isdecimal() else None


def parsed_call(statement: Statement) -> tuple[str, list[ast.expr], dict[str, ast.expr]] | None:
    """The function that a statement calls and its arguments; operand i reads as the name `operand_i`."""
    names = [f"operand_{number}" for number in range(len(statement.operands))]
    try:
        node = ast.parse(statement.template.format(*names), mode="eval").body
    except (SyntaxError, ValueError, IndexError, KeyError):  # a template that is no call of this form
        return None
    if not isinstance(node, ast.Call) or any(keyword.arg is None for keyword in node.keywords):
        return None
    return ast.unparse(node.func), node.args, {str(keyword.arg): keyword.value for keyword in node.keywords}


def parse_norm(statement: Statement) -> ChainNorm | None:
    """The norm that a statement is; None where it is another operation, or a norm over more than one dimension."""
    parsed = parsed_call(statement)
    if statement.call is not None or parsed is None or parsed[0] not in _NORM_ARGUMENTS:
        return None
    function, positional, named = parsed
    names = _NORM_ARGUMENTS[function]
    given = {**dict(zip(names, positional, strict=False)), **named}
    if len(positional) > len(names) or set(given) - set(names) or _operand(statement, given.get("input")) is None:
        return None
    if given["input"] is not positional[0] or _operand(statement, given["input"]) != statement.operands[0]:
        return None
    kind = function.rpartition(".")[2]
    shape, eps = _literal(given.get("normalized_shape")), _literal(given.get("eps"))
    if eps is None and kind == "layer_norm" and "eps" not in given:
        eps = _LAYER_NORM_EPS
    if not isinstance(shape, tuple | list) or len(shape) != 1 or not isinstance(eps, float):
        return None
    affine = [given.get(name) for name in ("weight", "bias")]
    refs = [_operand(statement, node) for node in affine]
    absent = [node is None or _is_none(node) for node in affine]
    if any(ref is None and not none for ref, none in zip(refs, absent, strict=True)):
        return None
    return ChainNorm(kind, int(shape[0]), eps, refs[0], refs[1])


def _operand(statement: Statement, node: ast.expr | None) -> Ref | None:
    """The operand that an argument is, taken as it is."""
    if not isinstance(node, ast.Name) or not node.id.startswith("operand_"):
        return None
    return statement.operands[int(node.id.removeprefix("operand_"))]


def _literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_plain_activation(statement: Statement) -> bool:
    """Whether an activation is called with its operand alone; in place or not is one here, as nothing else reads it."""
    parsed = parsed_call(statement)
    if parsed is None or statement.call is not None or len(statement.operands) != 1:
        return False
    function, positional, named = parsed
    if not function.startswith("torch."):  # a method: operand_0.relu()
        return function == f"operand_0.{statement.op}" and not positional and not named
    harmless = {"inplace": (False, True), "approximate": ("none",)}
    plain = all(_literal(value) in harmless.get(name, ()) for name, value in named.items())
    return plain and [_operand(statement, node) for node in positional] == [statement.operands[0]]


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
