"""Puts statements of a canonical form among the traced ones, each in the place of what computes the same there."""

from __future__ import annotations

from dataclasses import replace

from loka.graph.canonical.views import is_permuted
from loka.graph.expression import RefKind, locals_in, method
from loka.graph.ir import BatchNorm, ConcatNorm, DotInteraction, FmInteraction, ForwardIR, Region, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import AROUND

_TOGETHER = AROUND | {"unflatten", "flatten"}


class _TangledError(Exception):
    """Traced statements cannot do without what the canonical ones keep to themselves."""


def canonical_only(forward: ForwardIR) -> ForwardIR:
    """The forward in canonical form alone."""
    return replace(forward, traced=())


def spliced(forward: ForwardIR, kept: frozenset[int]) -> ForwardIR:
    """The forward as it was traced, but for the canonical statements at `kept`, with the patterns of these alone.

    A local is the same value in both forms, so traced statements read what is put in; what nothing reads any more goes.
    What only kept statements read stands just before these. Where traced statements read it, too, the whole forward is
    canonical.
    """
    if not forward.traced:
        return forward
    try:
        statements = _Splice(forward, kept).statements()
    except _TangledError:
        return canonical_only(forward)
    return _with_patterns(replace(forward, statements=tuple(statements), traced=(), near=()), forward, kept)


class _Splice:
    def __init__(self, forward: ForwardIR, kept: frozenset[int]) -> None:
        self._forward = forward
        self._places = {step.target: place for place, step in enumerate(forward.statements) if step.target != "_"}
        self._traced = {step.target: step for step in forward.traced if step.target != "_"}
        steps = (step for step in forward.statements if step.target != "_")
        self._canonical = {step.target: step for step in steps if step != self._traced.get(step.target)}
        self._readers = readers_of(forward)
        self._kept = {forward.statements[place].target for place in kept} - {"_"}
        self._inner = {name for name in self._kept if (read := self._readers.get(name)) and read <= kept}
        self._chosen = self._traced | {name: self._canonical[name] for name in self._taken()}
        self._made: list[Statement] = []
        self._begun: set[str] = set()
        self._done: set[str] = set()

    def statements(self) -> list[Statement]:
        """All statements, in the order in which they were traced as far as that can be."""
        live = self._live()
        self._make_contiguous(live)
        for step in self._forward.traced:
            if step.target == "_":
                self._put_all(_read(step))
                self._made.append(step)
            elif step.target in live and not self._is_with_reader(step.target):
                self._put(step.target)
        self._put_all({*locals_in(self._forward.result), *self._kept})
        return self._made

    def _is_with_reader(self, name: str) -> bool:
        """True for what stands just before what reads it; random numbers, say, are drawn in the order as traced."""
        step = self._chosen[name]
        together = step.call is not None or step.op in _TOGETHER or isinstance(step.called, BatchNorm)
        return name in self._inner and together

    def _make_contiguous(self, live: set[str]) -> None:
        """Permuted views that stand for what does not permute as traced, where traced statements read them."""
        read = {*locals_in(self._forward.result)}
        for step in self._forward.traced:
            stays = step.target == "_" or (step.target in live and self._chosen[step.target] is step)
            read |= _read(step) if stays and step.target not in self._kept else set()
        for name in read & self._canonical.keys() & self._traced.keys():
            step = self._chosen[name]
            if is_permuted(step.value) and not is_permuted(self._traced[name].value):
                self._chosen[name] = replace(step, value=method(step.value, "contiguous"))

    def _taken(self) -> set[str]:
        """The locals that canonical statements make: the kept ones, and those that cannot do without these.

        What is made of a kept local that is in the canonical form alone is canonical, too.
        """
        taken = self._kept & self._canonical.keys()
        fresh = self._kept - self._traced.keys()
        while True:
            before = len(taken)
            for name, step in self._canonical.items():
                if _read(step) & fresh:
                    (taken if name in self._traced else fresh).add(name)
            self._take_readers(taken)
            if len(taken) == before:
                return taken | (self._canonical.keys() - self._traced.keys())

    def _take_readers(self, taken: set[str]) -> None:
        """Takes what reads locals that kept statements keep to themselves, or products that kept ones now make."""
        lost = set(self._inner)
        steps = (self._forward.statements[self._places[name]] for name in self._kept)
        called = {step.call.site for step in steps if step.call is not None}
        for step in self._forward.traced:
            if step.target in taken or step.target in self._kept:
                continue
            elsewhere = step.call is not None and step.call.site in called and not self._is_call(step.target)
            if not elsewhere and not _read(step) & lost:
                continue
            if step.target in self._canonical:
                taken.add(step.target)
            elif step.target == "_":
                raise _TangledError
            else:
                lost.add(step.target)
        if lost & {*locals_in(self._forward.result)}:
            raise _TangledError

    def _is_call(self, name: str) -> bool:
        """True for a local that is the product of a site in canonical form, too."""
        return name in self._places and self._forward.statements[self._places[name]].call is not None

    def _live(self) -> set[str]:
        """The locals that something needs; traced ones that nothing ever read are there for their effects."""
        own = {name for step in self._forward.traced for name in _read(step)}
        effects = {name for name in self._traced if name not in own}
        effects |= {name for name in self._traced.keys() & self._places.keys() if name not in self._readers}
        waiting = [*effects, *self._kept, *locals_in(self._forward.result)]
        waiting += [name for step in self._forward.traced if step.target == "_" for name in _read(step)]
        live: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in live and name in self._chosen:
                live.add(name)
                waiting += _read(self._chosen[name])
        return live

    def _put_all(self, names: set[str]) -> None:
        for name in sorted(names & self._chosen.keys(), key=lambda name: self._places.get(name, -1)):
            self._put(name)

    def _put(self, name: str) -> None:
        """A statement after what it reads."""
        if name in self._done:
            return
        if name in self._begun:
            raise _TangledError
        self._begun.add(name)
        self._put_all(_read(self._chosen[name]))
        self._made.append(self._chosen[name])
        self._done.add(name)


def _read(step: Statement) -> set[str]:
    return {ref.text for ref in step.operands if ref.kind is RefKind.LOCAL}


def _with_patterns(forward: ForwardIR, canonical: ForwardIR, kept: frozenset[int]) -> ForwardIR:
    """The forward with the patterns of the canonical one that are of kept statements alone."""
    made = {step.target: place for place, step in enumerate(forward.statements)}
    places = {place: made[canonical.statements[place].target] for place in kept}

    def all_to(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(places[place] for place in found)

    def region(each: Region) -> Region:
        return replace(each, first=places[each.first], last=places[each.last])

    def mix(each: FmInteraction) -> FmInteraction:
        compress = None if each.compress is None else places[each.compress]
        skipped, gemms = all_to(each.skipped), all_to(each.gemms)
        return replace(
            each, first=places[each.first], outer=places[each.outer], compress=compress, skipped=skipped, gemms=gemms
        )

    def join(each: ConcatNorm) -> ConcatNorm:
        return replace(each, norm=places[each.norm], skipped=all_to(each.skipped))

    def dot(each: DotInteraction) -> DotInteraction:
        return replace(each, product=places[each.product], skipped=all_to(each.skipped))

    return replace(
        forward,
        regions=tuple(region(each) for each in canonical.regions if {each.first, each.last} <= kept),
        mixes=tuple(mix(each) for each in canonical.mixes if {each.first, *each.places, *each.gemms} <= kept),
        joins=tuple(join(each) for each in canonical.joins if {*each.places} <= kept),
        dots=tuple(dot(each) for each in canonical.dots if {*each.places} <= kept),
    )
