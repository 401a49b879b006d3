"""residual_high_precision: residual sums are computed and kept in a wider dtype.

A residual sum is a + b, both locals of the forward with the same shape, where the other is computed from one of them or
from the tensor that it is a view of, or where one is widened already: x + f(x), and whatever is added to it later. The
mod guarantees, within the forward of an owner and its inlined children:

- Each residual sum is computed in float32 (or the model's dtype, if that is wider), and rounded only to float32. The
  result of a branch f(x) is rounded by the branch, as before.
- The sum stays in float32 for the next residual sum, for norms over the last dimension, whose results also stay in
  float32 for the next residual sum, and through changes of view before either.
- Every other reader of the sum or the norm (a GEMM, a product, the owner's result) gets it in the dtype that it has in
  the model, cast once; so all other dtypes, of the owner's result and of every gradient too, are the model's.

It is the same function at a higher precision, so results are not bitwise equal, but closer to the model in float32. In
a float32 model nothing changes. Parameters and the keys of the state_dict stay. The cost is memory: the tensors of a
stream that autograd saves are twice as large.

With `dtype: bfloat16` a float16 model's streams are kept in bfloat16, which has the range of float32 at less precision;
streams of any other dtype do not change.

Linear chains and concatenation norms support such sums directly, as their kernels add in float32 and return the wider
dtype; a chain of several cross layers ends at each, as the next linear reads a cast. Patterns match owners: the model
("*"), or the modules that hold a stream. If both a module and one inside it match, the outer one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from loka.graph.expression import Arg, Call, Constant, Ref, RefKind, local, locals_in, method
from loka.graph.ir import DTYPE, ForwardIR, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.norm import NormRun, norm_starting_at
from loka.graph.sites.flow import Flow
from loka.graph.source import has_own_forward
from loka.mods.adaptation import Setting
from loka.mods.protocols import OwnerMod, UnplannedModel
from loka.mods.rewriting.rewriting_tools import free_names
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner, is_under, writer_of

NAME = "residual_high_precision"
NO_SUM = "its forward has no residual sum a + b of locals of one shape, one of which is computed from the other"

_SUMS = ("operator.add", "torch.add", ".add")
_VIEWS = frozenset({"flatten", "unflatten", "view", "reshape", "transpose", "permute", "squeeze", "unsqueeze"})
_SIZES = (".size", ".dim", ".numel")
_FLOAT32 = Constant("torch.float32")


def widen_residual_sums(forward: ForwardIR, dtype: str, wants: Callable[[str], bool]) -> RewrittenOwner | str:
    """The forward with its residual sums kept in `dtype`, "float32" or "bfloat16"; or the reason why not.

    `wants` is true for names of modules whose sums are to be widened. `Statement.even` marks the sums of equal shapes.
    Findings that index statements (regions, patterns) are dropped.
    """
    stream = _residual_stream(forward, wants)
    if not stream.sums:
        return NO_SUM
    statements = _Writer(forward, stream, dtype).written()
    rewritten = replace(forward, statements=statements, regions=(), mixes=(), joins=(), dots=())
    return RewrittenOwner(rewritten, tuple(forward.statements[place].target for place in sorted(stream.sums)))


@dataclass(frozen=True, slots=True)
class _ResidualStream:
    """The statements of a forward that are kept in a wider dtype, by index."""

    sums: frozenset[int]
    norms: Mapping[int, NormRun]  # by first statement; norms that read widened locals
    views: frozenset[int]  # before a sum or a norm

    def widened_locals(self, forward: ForwardIR) -> frozenset[str]:
        """The locals that are kept in a wider dtype."""
        ends = {*self.sums, *self.views, *(run.last for run in self.norms.values())}
        return frozenset(forward.statements[place].target for place in ends)


def _residual_stream(forward: ForwardIR, wants: Callable[[str], bool]) -> _ResidualStream:
    """The residual sums, the norms of them, and the views before the next of these."""
    statements = forward.statements
    before: dict[str, set[str]] = {}  # the locals that a local is computed from
    widened: set[str] = set()
    viewed: dict[str, str] = {}  # the local that a local is a view of
    sums, norms, views = set(), dict[int, NormRun](), set()
    for place, statement in enumerate(statements):
        read = [ref.text for ref in statement.operands if ref.kind is RefKind.LOCAL]
        before[statement.target] = {*read}.union(*(before.get(name, set()) for name in read))
        if _is_view(statement):
            viewed[statement.target] = viewed.get(read[0], read[0])
        run = norm_starting_at(statements, place)
        if _is_residual(statement, before, viewed, widened) and wants(writer_of(forward, place)):
            sums.add(place)
            widened.add(statement.target)
        elif run is not None and run.source in widened and _is_closed(forward, run):
            norms[place] = run
            widened.add(statements[run.last].target)
        elif _is_view(statement) and read[:1] and read[0] in widened and statement.target not in widened:
            views.add(place)
            widened.add(statement.target)
    return _ResidualStream(frozenset(sums), norms, frozenset(_leading_on(forward, sums, norms, views)))


def _is_residual(
    statement: Statement, before: Mapping[str, set[str]], viewed: Mapping[str, str], widened: set[str]
) -> bool:
    if not _is_sum(statement):
        return False
    left, right = locals_in(statement.value)
    pairs = ((left, right), (right, left))
    related = any(viewed.get(one, one) in before.get(other, set()) for one, other in pairs)
    return related or left in widened or right in widened


def _is_sum(statement: Statement) -> bool:
    """True for a sum of two locals of its shape, and nothing else."""
    return statement.even and isinstance(statement.value, Call) and statement.value.target in _SUMS


def _got(value: Arg, name: str) -> Call:
    return Call("getattr", (value, name))


def _is_of_sizes(statement: Statement) -> bool:
    """True if only the sizes of a local are read."""
    value = statement.value
    if not isinstance(value, Call) or value.args[:1] != statement.operands:
        return False
    return value.target in _SIZES or (value.target, value.args[1:]) == ("getattr", ("shape",))


def _is_view(statement: Statement) -> bool:
    kinds = [ref.kind for ref in statement.operands]
    return statement.op in _VIEWS and statement.call is None and kinds == [RefKind.LOCAL]


def _is_closed(forward: ForwardIR, run: NormRun) -> bool:
    """True if intermediate results of a norm of several statements are read only by the norm."""
    readers, inside = readers_of(forward), set(range(run.first, run.last + 1))
    return all(readers.get(forward.statements[place].target, set()) <= inside for place in range(run.first, run.last))


def _leading_on(forward: ForwardIR, sums: set[int], norms: Mapping[int, NormRun], views: set[int]) -> Iterator[int]:
    """The views whose readers are a sum, a norm, or another such view."""
    useful = {ref.text for place in (*sums, *norms) for ref in forward.statements[place].operands}
    for place in sorted(views, reverse=True):
        statement = forward.statements[place]
        if statement.target in useful:
            useful.add(statement.operands[0].text)
            yield place


class _Writer:
    """Rewrites the forward: widened locals get a second name, and are cast before their first other reader."""

    def __init__(self, forward: ForwardIR, stream: _ResidualStream, dtype: str) -> None:
        self._forward, self._stream, self._dtype_name = forward, stream, dtype
        self._kept_wide = stream.widened_locals(forward)
        self._new = free_names(forward)
        self._wide: dict[str, str] = {}  # local -> its name in the wider dtype
        self._dtypes: dict[str, Ref] = {}  # widened local -> something with its dtype in the model
        self._sources: dict[str, Statement] = {}  # widened local -> the original statement that sets it
        self._cast: set[str] = set()  # widened locals that were cast to the model's dtype too
        self._roots = self._widened()
        self._made: list[Statement] = []

    def written(self) -> tuple[Statement, ...]:
        """The statements."""
        for text in self._forward.arguments:
            self._widen(text.partition("=")[0].strip(), "")
        place, statements = 0, self._forward.statements
        while place < len(statements):
            run = self._stream.norms.get(place)
            last = run.last if run is not None else place
            for number in range(place, last + 1):
                self._write(number, run)
            place = last + 1
        for name in sorted(self._kept_wide.intersection(locals_in(self._forward.result))):
            self._narrow(name)
        return tuple(self._made)

    def _widened(self) -> frozenset[str]:
        """The locals that enter a stream: of two operands that are not widened, the one that is set first.

        For bfloat16, all operands that are not widened: torch adds a bfloat16 and a float16 in float32.
        """
        found = set[str]()
        for place in self._stream.sums:
            statement = self._forward.statements[place]
            left, right = (ref.text for ref in statement.operands)
            if self._dtype_name == "bfloat16":
                found |= {left, right} - self._kept_wide
            elif left not in self._kept_wide and right not in self._kept_wide:
                found.add(left if self._is_before(left, right) else right)
        return frozenset(found)

    def _is_before(self, one: str, other: str) -> bool:
        """True if a local is set before another; an argument is set before every statement."""
        order = [statement.target for statement in self._forward.statements]
        return one not in order or (other in order and order.index(one) < order.index(other))

    def _write(self, place: int, run: NormRun | None) -> None:
        statement = self._forward.statements[place]
        if place in self._stream.sums or place in self._stream.views or run is not None:
            ends = run is None or place == run.last
            self._write_wide(statement, renamed=ends, vectors=run is not None and run.first == run.last)
        else:
            read = {ref: self._read(ref, statement) for ref in statement.operands}
            self._made.append(statement.reads(lambda ref: read[ref]))
        self._widen(statement.target, statement.note)

    def _write_wide(self, statement: Statement, renamed: bool, vectors: bool) -> None:
        """Writes a statement on wide operands; `renamed`: widen its target; `vectors`: cast what is not wide."""

        def read(ref: Ref) -> Arg:
            if ref.text in self._wide:
                return local(self._wide[ref.text])
            return self._wider(ref) if vectors else ref

        wide, target = statement.reads(read), statement.target
        if renamed:
            self._wide[target] = self._new(f"{target}_wide")
            self._sources[target] = statement
        self._made.append(replace(wide, target=self._wide.get(target, target)))

    def _wider(self, value: Ref) -> Call:
        """A value in the wider dtype."""
        if self._dtype_name == "float32":
            return method(value, "to", Call("torch.promote_types", (_got(value, "dtype"), _FLOAT32)))
        is_half = Call("operator.eq", (_got(value, "dtype"), Constant("torch.float16")))
        return Call("if", (is_half, method(value, "to", Constant("torch.bfloat16")), value))

    def _widen(self, name: str, note: str) -> None:
        """Write the wider copy of a local that enters a stream.

        It is a separate tensor even if nothing is cast, as the compiler rejects a function with one tensor as two
        arguments.
        """
        if name in self._roots:
            self._wide[name] = self._new(f"{name}_wide")
            value = method(self._wider(local(name)), "view_as", local(name))
            self._made.append(Statement(self._wide[name], "to", value, note=note))

    def _read(self, ref: Ref, statement: Statement) -> Ref:
        """An operand of a statement outside the stream: in the model's dtype, except for reading its sizes."""
        if ref.kind is not RefKind.LOCAL or ref.text not in self._kept_wide:
            return ref
        if _is_of_sizes(statement):
            return local(self._wide[ref.text])
        self._narrow(ref.text)
        return ref

    def _narrow(self, name: str) -> None:
        """Cast a widened local to its dtype in the model, once."""
        if name not in self._cast:
            self._cast.add(name)
            value = method(local(self._wide[name]), "to", self._dtype(name))
            self._made.append(Statement(name, "to", value, note=self._sources[name].note))

    def _dtype(self, name: str) -> Ref:
        """The local with the dtype that a widened one has in the model; computed before its first reader."""
        if name in self._dtypes:
            return self._dtypes[name]
        source = self._sources[name]
        read = locals_in(source.value)
        if self._is_view_of_stream(name):
            return self._dtype(read[0])
        if _is_sum(source):
            dtypes = (self._dtype(each) if each in self._kept_wide else _got(local(each), "dtype") for each in read)
            value = Call("torch.promote_types", tuple(dtypes))
        else:
            # Under autocast a norm returns float32 for every input except float64.
            own, device = self._dtype(self._normed(name)), _got(_got(local(self._wide[name]), "device"), "type")
            wide = Call("torch.promote_types", (own, _FLOAT32))
            value = Call("if", (Call("torch.is_autocast_enabled", (device,)), wide, own))
        target = self._new(f"{name}_dtype")
        self._made.append(Statement(target, DTYPE, value, note=source.note))
        self._dtypes[name] = local(target)
        return self._dtypes[name]

    def _is_view_of_stream(self, name: str) -> bool:
        return any(self._forward.statements[place].target == name for place in self._stream.views)

    def _normed(self, name: str) -> str:
        """The input of the norm that sets a local."""
        runs = self._stream.norms.values()
        return next(run.source for run in runs if self._forward.statements[run.last].target == name)


_LISTS = (nn.ModuleList, nn.ModuleDict)  # without a forward


@dataclass(frozen=True, slots=True)
class ResidualHighPrecisionMod:
    """Widens the residual sums of the outermost matched modules that contain one."""

    name: str = NAME
    exact: bool = True
    description: str = "residual sums add, and stay for the next sum and for norms, in a wider dtype"
    nothing: str = NO_SUM

    def scopes(self, model: nn.Module, wants: Callable[[str], bool], flow: Flow) -> tuple[OwnerScope, ...]:
        """The outermost of the wanted modules with a sum in their own forward or below."""
        modules = dict(model.named_modules())
        adding = {name for name, operations in flow.operations.items() if "add" in operations}
        writers = [name for name, module in modules.items() if name in adding and has_own_forward(module)]
        found: list[OwnerScope] = []
        for name, module in modules.items():  # a module comes before its children
            if wants(name) and not isinstance(module, _LISTS) and not any(is_under(name, each.owner) for each in found):
                inside = [writer for writer in writers if is_under(writer, name)]
                if inside:
                    found.append(_stream(name, inside))
        return tuple(found)

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """The scopes inside a module whose own forward cannot be traced."""
        below = [writer for writer in scope.writers if writer != scope.owner]
        outer = [name for name in below if not any(other != name and is_under(name, other) for other in below)]
        return tuple(_stream(name, [each for each in below if is_under(each, name)]) for name in outer)

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The forward with its residual sums in the wider dtype."""
        return widen_residual_sums(forward, str(settings["dtype"]), means)

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """Description of `count` residual sums."""
        return f"{count} residual sum{'s' if count > 1 else ''} in {settings['dtype']}"

    def proposal(self, model: UnplannedModel) -> str | None:
        """None: it costs memory, so users have to ask for it."""
        return None


def _stream(owner: str, writers: Sequence[str]) -> OwnerScope:
    return OwnerScope(NAME, owner, tuple(writers), tuple(name for name in writers if name != owner))


MOD: OwnerMod = ResidualHighPrecisionMod()
