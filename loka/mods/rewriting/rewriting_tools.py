"""Tools to change straight-line forwards, shared by mods. Every function returns a new forward."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.errors import LokaError
from loka.graph.expression import PRODUCT, Call, Ref, RefKind, local, mapped, of_product, refs_in
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import NORMS
from loka.graph.sites.flow import ACTIVATIONS, ELEMENTWISE
from loka.graph.trace.printer import variable

VIEWS = frozenset({"getitem", "unbind", "chunk", "split"})
PURE = (
    VIEWS | ACTIVATIONS | ELEMENTWISE | NORMS
    | {"transpose", "permute", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
    | {"linear", "cat", "stack"}
)  # fmt: skip  # operations without an effect but their result; in place or not is said by their arguments
SEVERAL_CALLS = "its forward calls it several times"
NOT_PLAIN = "it is not written as a linear over one local of the forward"


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a site's weight: N x K."""

    k: int
    n: int


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A statement of a site that is y = linear(x, weight, bias) of a local, without a change of view."""

    place: int  # index in `ForwardIR.statements`
    site: str
    x: str  # the local
    statement: Statement
    call: SiteCall


def plain_linears(forward: ForwardIR, sites: Mapping[str, Size]) -> tuple[tuple[PlainLinear, ...], dict[str, str]]:
    """The sites' calls that are plain linears, in the order of `sites`; for others that are called, the reason.

    A site that is called twice is not included.
    """
    found: dict[str, PlainLinear] = {}
    reasons: dict[str, str] = {}
    for place, statement in enumerate(forward.statements):
        call = statement.call
        if call is None or call.site not in sites:
            continue
        if call.site in found or call.site in reasons:
            found.pop(call.site, None)
            reasons[call.site] = SEVERAL_CALLS
            continue
        linear = _plain(place, statement, call)
        if linear is None:
            reasons[call.site] = NOT_PLAIN
        else:
            found[call.site] = linear
    return tuple(found[site] for site in sites if site in found), reasons


def _plain(place: int, statement: Statement, call: SiteCall) -> PlainLinear | None:
    x = call.x
    if call.out != PRODUCT or not isinstance(x, Ref) or x.kind is not RefKind.LOCAL:
        return None
    if any(ref.kind is not RefKind.ATTRIBUTE for ref in refs_in(call.weight, call.bias)):
        return None
    return PlainLinear(place, call.site, x.text, statement, call)


def linear_statement(target: str, call: SiteCall, note: str) -> Statement:
    """A site's call as torch.nn.functional.linear between its changes of view."""
    return Statement(target, "linear", call.linear(call.x, call.weight, call.bias), call, note)


def free_names(forward: ForwardIR) -> Callable[[str], str]:
    """A function that makes names for new locals from hints, distinct from all others of the forward."""
    taken = argument_names(forward) | {statement.target for statement in forward.statements}
    return lambda hint: variable(hint, taken)


def argument_names(forward: ForwardIR) -> set[str]:
    """The names of a forward's arguments, without stars and defaults."""
    return {text.partition("=")[0].strip("* ") for text in forward.arguments}


def with_statements(forward: ForwardIR, statements: Sequence[Statement]) -> ForwardIR:
    """The forward with other statements; patterns that index the old ones are dropped.

    Raises LokaError where regions were found already: mods must come first.
    """
    if forward.regions:
        raise LokaError("a mod came after regions were found. This is a fault in LoKA: please report it.")
    return replace(forward, statements=tuple(statements), mixes=(), joins=())


def without_dead(forward: ForwardIR, pure: Container[str]) -> ForwardIR:
    """The forward without unread statements whose targets are in `pure`."""
    while True:
        readers = readers_of(forward)
        kept = [step for step in forward.statements if step.target not in pure or step.target in readers]
        if len(kept) == len(forward.statements):
            return forward
        forward = with_statements(forward, kept)


def common_activation(forward: ForwardIR, group: Sequence[PlainLinear]) -> tuple[int, ...] | None:
    """Indices of the activations that are the only readers of the linears, all called alike; None without these."""
    readers = readers_of(forward)
    places = []
    for linear in group:
        read = readers.get(linear.statement.target, set())
        if len(read) != 1 or max(read) >= len(forward.statements):
            return None
        places.append(max(read))
    steps = [forward.statements[place] for place in places]
    alike = {(step.op, mapped(step.value, lambda _: PRODUCT)) for step in steps}
    alone = all(len(step.operands) == 1 and step.call is None and step.target != "_" for step in steps)
    return tuple(places) if len(alike) == 1 and alone and steps[0].op in ACTIVATIONS else None


def taken_apart(
    forward: ForwardIR,
    product: str,
    group: Sequence[PlainLinear],
    after: Sequence[int] | None,
    split: Call,
    name: Callable[[str], str],
) -> list[Statement]:
    """The statements that make the results of several linears of their joined `product`.

    `after` are their activations, which are computed on all of it; `split` is the method of `PRODUCT` that takes it
    apart; `name` makes names for locals.
    """
    made = []
    if after is not None:
        step = forward.statements[after[0]]
        activated = name(f"{product}_{step.op}")
        made.append(Statement(activated, step.op, mapped(step.value, lambda _: local(product)), note=step.note))
        product = activated
    parts = name("parts")
    made.append(Statement(parts, split.target.removeprefix("."), of_product(split, local(product))))
    for number, place in enumerate(after or [linear.place for linear in group]):
        target = forward.statements[place].target
        made.append(Statement(target, "getitem", Call("operator.getitem", (local(parts), number))))
    return made


def joined_name(members: Sequence[str]) -> str:
    """Name of several sites together: "layers.0.q+k", "experts.0.0+7" for eight of them."""
    return "+".join(members) if len(members) < 4 else f"{members[0]}+{len(members) - 1}"
