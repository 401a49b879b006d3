"""Regions outlined as functions: values read from outside become parameters, the GEMM becomes the FP8 linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka.codegen.layout import call, formatted
from loka.codegen.modules import statement_text
from loka.codegen.names import Names, is_plain_variable, variable_name, wrapped
from loka.graph.expression import PRODUCT, Ref, RefKind, refs_in
from loka.graph.ir import Region, SiteCall, Statement

_INDENT = 4


@dataclass(frozen=True, slots=True)
class RegionView:
    """View of an outlined function, for templates/region.py.j2."""

    header: str
    docstring: str
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionLinear:
    """Replacement of a region's GEMM: the wrapper, and whether its weight is an argument, as one that is frozen is."""

    function: str
    takes_weight: bool


class Regions:
    """The outlined functions of one package: regions with the same body share one."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._functions: dict[tuple[str, ...], str] = {}
        self.views: list[RegionView] = []
        self.imports: set[str] = set()

    def function(
        self, region: Region, statements: Sequence[Statement], linear: RegionLinear
    ) -> tuple[str, tuple[Ref, ...]]:
        """The name of the function for a region, and its arguments before the weight and counter_id."""
        reads = outside_reads(statements, linear.takes_weight)
        neutral = _Outline(statements, reads, linear, lambda ref, number: f"p{number}", lambda number: f"v{number}")
        key = tuple(neutral.body)
        if key not in self._functions:
            outline = _Outline(statements, reads, linear, _parameter_name, lambda number: statements[number].target)
            name = self._names.unique(_function_name(region))
            self._functions[key] = name
            self.imports |= outline.imports
            said = linear.function.replace("_", " ")
            said = " -> ".join(said if op is None else op for op in _said_ops(region, statements))
            docstring = wrapped(said + ".", _INDENT, first=6)
            self.views.append(RegionView(_header(name, outline.parameters), docstring, tuple(outline.body)))
        return self._functions[key], reads


def outside_reads(statements: Sequence[Statement], takes_weight: bool) -> tuple[Ref, ...]:
    """Values that the statements read but do not set, each once, in order; without a weight that is an argument."""
    inside: set[str] = set()
    reads: dict[Ref, None] = {}
    for statement in statements:
        call = statement.call
        read = statement.operands if call is None or not takes_weight else refs_in(call.x, call.bias)
        for ref in read:
            if ref.kind is not RefKind.LOCAL or ref.text not in inside:
                reads.setdefault(ref)
        inside.add(statement.target)
    return tuple(reads)


def _function_name(region: Region) -> str:
    """layer_norm_linear_silu; a long name has only the first and the last operation."""
    name = variable_name("_".join(region.ops), "region")
    if len("_".join(region.ops)) > 50:
        name = variable_name(f"{region.ops[0]}_to_{region.ops[-1]}", "region")
    return name if len(region.ops) > 1 else f"{name}_region"


def _parameter_name(ref: Ref, number: int) -> str:
    if ref.kind is RefKind.LOCAL and is_plain_variable(ref.text):
        return ref.text
    return variable_name(ref.text, "value")


def _said_ops(region: Region, statements: Sequence[Statement]) -> list[str | None]:
    """Names of the region's operations, None for its GEMM."""
    return [None if statement.call is not None else variable_name(statement.op, "op") for statement in statements]


def _header(name: str, parameters: Sequence[str]) -> str:
    types = {"counter_id": "int", "weight": "dispatch.Weight"}
    typed = [f"{parameter}: {types.get(parameter, 'Tensor')}" for parameter in parameters]
    return f"def {call(name, typed)} -> Tensor:"


class _Outline:
    """Parameters and body of a region, with names from the two callables."""

    def __init__(
        self,
        statements: Sequence[Statement],
        reads: Sequence[Ref],
        linear: RegionLinear,
        parameter: Callable[[Ref, int], str],
        target: Callable[[int], str],
    ) -> None:
        own = ["weight", "counter_id"] if linear.takes_weight else ["counter_id"]
        self._scope = statement_text.NameScope(("weight", "counter_id"))
        self._attributes: dict[str, str] = {}
        self._linear = linear
        self.parameters: list[str] = []
        for number, ref in enumerate(reads):
            name = self._scope.names.unique(parameter(ref, number))
            self.parameters.append(name)
            (self._scope.local if ref.kind is RefKind.LOCAL else self._attributes)[ref.text] = name
        self.parameters += own
        self.body: list[str] = []
        self.imports: set[str] = set()
        for number, statement in enumerate(statements):
            self._add(statement, target(number), last=number == len(statements) - 1)

    def _add(self, statement: Statement, target: str, last: bool) -> None:
        scope = self._scope
        if statement.call is not None:
            code = self._product(statement.call)
        else:
            code = statement_text.expression(statement.value, self._name)
            self.imports |= statement_text.globals_of(code) - {"torch"}
        if last:
            self.body += statement_text.returned(code, _INDENT, scope)
        else:
            self.body += statement_text.assignment(self._define(statement, target), code, _INDENT, scope)

    def _define(self, statement: Statement, target: str) -> str:
        """The target's name; a target that is set again keeps its name."""
        scope = self._scope
        if statement.target not in scope.local:
            scope.local[statement.target] = scope.names.unique(
                target if is_plain_variable(target) else variable_name(target, "value")
            )
        return scope.local[statement.target]

    def _name(self, ref: Ref) -> str:
        """The text of a name: attributes of the module are parameters."""
        if ref.kind is RefKind.ATTRIBUTE:
            return self._attributes.get(ref.text, ref.text)
        # A local that only the weight reads is no parameter; the expression of that weight is not used then.
        return self._scope.local.get(ref.text, "_") if self._linear.takes_weight else self._scope.read(ref.text)

    def _product(self, site_call: SiteCall) -> str:
        """The call of the FP8 linear, with the model's change of view."""
        parts = statement_text.linear_text(site_call, self._name)
        weight = "weight" if self._linear.takes_weight else parts.weight
        product = call(self._linear.function, map(formatted, [parts.x, weight, parts.bias or "None", "counter_id"]))
        if site_call.out == PRODUCT:
            return product
        name = self._scope.names.unique("product")
        self.body += statement_text.assignment(name, product, _INDENT, self._scope)
        return statement_text.view_text(site_call.out, name)
