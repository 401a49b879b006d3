"""The body of a straight-line forward, with chains, outlined regions and FP8 linears for its planned GEMMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loka.codegen.chains.chain_calls import PlannedChain, chain_arguments, or_frozen, planned_chains, site_call
from loka.codegen.chains.chain_functions import Chains
from loka.codegen.chains.chain_stages import ChainStages
from loka.codegen.chains.interactions import (
    DotShape,
    InteractionCalls,
    concat_norm_arguments,
    concat_norm_shape,
    fm_arguments,
    fm_shape,
)
from loka.codegen.chains.static_operands import OPERANDS
from loka.codegen.layout import call, formatted
from loka.codegen.modules import statement_text
from loka.codegen.modules.linear_recipes import Recipes, site_recipe
from loka.codegen.modules.region_functions import RegionLinear, Regions
from loka.codegen.modules.signature import own_forward_lines, parse_argument
from loka.codegen.names import layers, shown, snake, wrapped
from loka.errors import LokaError
from loka.graph.expression import PRODUCT, Arg, Call, Constant, Ref, RefKind, expression_of, local, locals_in, text_of
from loka.graph.ir import DTYPE, ConcatNorm, DotInteraction, FmInteraction, ForwardIR, Region, unpadded
from loka.numerics.enums import Operand
from loka.plan.plan import PlannedBinding, SitePlan

INDENT = 8

Gatherable = tuple[int, str, str]  # a site, the path of its weight, and the kernel that quantizes it by row


@dataclass(frozen=True, slots=True)
class PackageKernels:
    """The functions of a package's kernels.py, registered as its forwards call them."""

    module: str  # name under which kernels.py is imported
    recipes: Recipes
    regions: Regions
    chains: Chains
    interactions: InteractionCalls


class ForwardBody:
    """The body of a straight-line forward."""

    def __init__(
        self,
        kernels: PackageKernels,
        forward: ForwardIR,
        binding: PlannedBinding,
        name: str,
        plans: Sequence[SitePlan],
    ) -> None:
        self._kernels = kernels
        self._forward = forward
        self._sites = binding.sites
        self._fallback = snake(name)  # name of functions whose layers have nothing in common
        self._layers = layers([(module,) for module in binding.modules], self._fallback)
        self._plans = plans
        self.arguments = [parse_argument(text) for text in forward.arguments]
        for argument in self.arguments:
            if argument.name in ("self", "torch", kernels.module):
                raise LokaError(
                    f"{forward.owner_type}: a forward with an argument called {argument.name!r} cannot be generated: "
                    "rename the argument, or keep this module by a rule"
                )
        self._scope = statement_text.NameScope(argument.name for argument in self.arguments if argument.name)
        self._used = statement_text.used_later(forward.statements, forward.result)
        self._index = _site_indices(forward, binding.sites[0])
        self._chains = planned_chains(forward, self._index, plans)
        taken = self._taken()
        self._mixes = [mix for mix in forward.mixes if taken.isdisjoint(mix.places)]
        joins = [join for join in forward.joins if taken.isdisjoint(join.places)]
        self._joins = [join for join in joins if concat_norm_shape(join, forward) is not None]
        self._dots = [dot for dot in forward.dots if taken.isdisjoint(dot.places)]
        self.known: dict[tuple[int, Operand], None] = {}  # (site, operand) pairs with static scales in the module
        self._handed: dict[str, str] = {}  # local -> name of its copy returned by an FM interaction
        self.freezable: dict[int, str] = {}  # site -> expression of its weight, which may be frozen
        self.imports: set[str] = set()
        self.lines = own_forward_lines(forward.guards, self.arguments, INDENT)
        for guard in forward.guards:
            self.imports |= statement_text.globals_of(guard)
        for parameter in _sliced(forward, [name for name, _ in binding.shapes]):
            # The gradients of the slices are stacked; of indices, each would fill a tensor of the Parameter's size.
            self.lines.append(" " * INDENT + f"{self._scope.unbind(parameter)} = {parameter}.unbind()")
        self._note = ""
        self._returned = False  # the last statement's value, without a name of its own
        self._names = {expression_of(name): name for name, _ in binding.shapes}
        self._gatherable: list[Gatherable] = []
        self._write()
        for argument in self.arguments:
            self.imports |= statement_text.globals_of(argument.default) if argument.default is not None else set()

    def _write(self) -> None:
        statements, position = self._forward.statements, 0
        regions = {region.first: region for region in self._forward.regions}
        joins = {join.norm: join for join in self._joins}
        dots = {dot.product: dot for dot in self._dots}
        absorbed = {place for mix in self._mixes for place in mix.places}
        absorbed |= {place for join in self._joins for place in join.skipped}
        absorbed |= {place for dot in self._dots for place in dot.skipped}
        while position < len(statements):
            region = regions.get(position)
            for mix in self._mixes:
                if mix.first == position:
                    self._mix(mix)
            if position in absorbed:
                position += 1
            elif position in joins:
                self._join(joins[position])
                position += 1
            elif position in dots:
                self._dot(dots[position])
                position += 1
            elif position in self._chains:
                self._chain(self._chains[position])
                position = self._chains[position].chain.last + 1
            elif statements[position].op == DTYPE:
                self._dtype(position)
                position += 1
            elif region is not None and self._outlined(region):
                self._region(region)
                position = region.last + 1
            else:
                self._statement(position)
                position += 1
        if self._returned:
            return
        result = statement_text.expression(self._forward.result, self._scope.text, ["self"])
        self._import(result)
        self.lines.append(" " * INDENT + f"return {result}")

    @property
    def fuses(self) -> bool:
        """True if kernels fuse operations around native GEMMs."""
        return bool(self._mixes or self._joins or self._dots) or any(
            not planned.shape.fp8 for planned in self._chains.values()
        )

    @property
    def gatherable(self) -> list[Gatherable]:
        """The weights of which the forward reads one FP8 copy alone."""
        reads = [ref for step in self._forward.statements for ref in step.operands]
        chosen = [path for _, path, _ in self._gatherable]
        return [
            each
            for each in self._gatherable
            if sum(ref.is_of(expression_of(each[1])) for ref in reads) == chosen.count(each[1])
        ]

    def _taken(self) -> set[int]:
        """Indices of the statements in chains and in outlined regions."""
        taken = {place for planned in self._chains.values() for place in planned.places}
        spans = {region: range(region.first, region.last + 1) for region in self._forward.regions}
        apart = [region for region, span in spans.items() if taken.isdisjoint(span)]
        return taken.union(*(spans[region] for region in apart if self._outlined(region)))

    def _dtype(self, position: int) -> None:
        """Write a statement that computes a dtype, possibly of a value that exists only inside a kernel."""
        value = self._of_known(self._forward.statements[position].value)
        self._assign(position, statement_text.expression(value, self._scope.text, self._scope.local.values()))

    def _of_known(self, value: Arg) -> Arg:
        """A value with the dtypes of locals that the text does not define from those that it does."""
        if not isinstance(value, Call):
            return value
        of = value.args[0] if value.target == "getattr" else None
        if isinstance(of, Ref) and of.text not in self._scope.local:
            return Constant(self._dtype_of(of.text))
        return replace(value, args=tuple(map(self._of_known, value.args)))

    def _dtype_of(self, name: str) -> str:
        """Expression for the dtype of a local; if the text does not define it, from the locals it is computed from."""
        if name in self._scope.local:
            return f"{self._scope.read(name)}.dtype"
        made = next(step for step in self._forward.statements if step.target == name)
        read = [ref.text for ref in made.operands if ref.kind is RefKind.LOCAL]
        if made.call is not None:
            known = read[0] in self._scope.local
            return f"dispatch.output_dtype({self._scope.read(read[0])})" if known else self._dtype_of(read[0])
        found = self._dtype_of(read[0])
        for other in read[1:]:
            found = f"torch.promote_types({found}, {self._dtype_of(other)})"
        return found

    def _mix(self, mix: FmInteraction) -> None:
        """Call an FM interaction's function at the position of its first statement."""
        shape, statements = fm_shape(mix, self._joins), self._forward.statements
        code = self._called(self._kernels.interactions.function(shape, self._layers), fm_arguments(mix, self._scope))
        made, views = [], []
        for place, view in zip(mix.made, mix.views, strict=True):
            target = self._target(statements[place].target) or "_"
            made.append(target if view == PRODUCT or target == "_" else self._scope.names.unique("product"))
            if made[-1] != target:
                views.append((target, statement_text.view_text(view, made[-1])))
        if shape.passes:
            self._handed[mix.x] = self._scope.names.unique(f"{mix.x}_passed")
            made.append(self._handed[mix.x])
        self.lines += statement_text.assignment(", ".join(made), code, INDENT, self._scope)
        for target, view_code in views:
            self.lines += statement_text.assignment(target, view_code, INDENT, self._scope)

    def _join(self, join: ConcatNorm) -> None:
        shape = concat_norm_shape(join, self._forward)
        if shape is None:
            raise LokaError(f"no kernel joins for statement {join.norm}. This is a fault in LoKA: please report it.")
        arguments = concat_norm_arguments(join, self._forward, self._scope, self._handed)
        self._comment_notes(range(join.norm, join.norm + 1))
        self._assign(join.norm, self._called(self._kernels.interactions.function(shape, self._layers), arguments))

    def _dot(self, dot: DotInteraction) -> None:
        function = self._kernels.interactions.function(DotShape(*dot.sizes), self._layers)
        self._comment_notes(range(dot.product, dot.product + 1))
        self._assign(dot.product, self._called(function, [self._scope.read(dot.x)]))

    def _chain(self, planned: PlannedChain) -> None:
        chain, shape = planned.chain, planned.shape
        linears = [stage.linear for stage in chain.stages]
        freezes = shape.fp8 and self._freeze_all(linears)
        arguments = chain_arguments(self._forward, planned, self._scope, freezes)
        if shape.known:
            self.known |= {(number, operand): None for number in planned.sites for operand in OPERANDS}
        kernels = ChainStages(shape).weight_kernels()
        for place, (number, kernel) in enumerate(zip(planned.sites, kernels, strict=bool(kernels))):
            gemm = site_call(self._forward, linears[place])
            bare = unpadded(gemm) if shape.stages[0].given and place == 0 else None
            path = self._names.get(text_of(gemm.weight if bare is None else bare.weight))
            self._gatherable += [] if path is None else [(number, path, kernel)]
        of_modules = [[sites[number] for number in planned.sites] for sites in self._sites]
        function = self._kernels.chains.function(shape, layers(of_modules, self._fallback, self._sites[0]))
        code = self._called(function, arguments)
        self._import(code)
        self._comment_notes(range(chain.first, chain.last + 1))
        self._assign_product(chain.last, code, site_call(self._forward, linears[-1]).out)

    def _runs_fp8(self, position: int) -> bool:
        """True if the statement is a GEMM that runs in FP8: any of the three."""
        return position in self._index and site_recipe(self._plans[self._index[position]]).fp8

    def _outlined(self, region: Region) -> bool:
        """True if a region becomes a function: its GEMM runs in FP8, and it has other operations, none of a module."""
        statements = self._forward.statements[region.first : region.last + 1]
        if any(statement.called is not None for statement in statements):
            return False
        calls = [place for place, statement in enumerate(statements, region.first) if statement.call is not None]
        if len(calls) != 1 or region.last >= len(self._forward.statements):
            raise LokaError(
                f"the region of {region.site!r} holds {len(calls)} GEMMs. Please report this fault in LoKA."
            )
        return self._runs_fp8(calls[0]) and region.last > region.first

    def _region(self, region: Region) -> None:
        numbers = range(region.first, region.last + 1)
        statements = [self._forward.statements[number] for number in numbers]
        position = next(number for number in numbers if self._forward.statements[number].call is not None)
        index, gemm = self._index[position], site_call(self._forward, position)
        function = self._kernels.recipes.linear(site_recipe(self._plans[index]))
        freezes = self._freeze_all([position])
        name, reads = self._kernels.regions.function(region, statements, RegionLinear(function, freezes))
        operands = list(map(self._scope.text, reads))
        weight = [or_frozen(index, text_of(gemm.weight))] if freezes else []
        arguments = [*operands, *weight, f"self.loka.counter_id({index})"]
        code = self._called(name, arguments)
        self._comment_notes(numbers)
        self._assign(region.last, code)

    def _statement(self, position: int) -> None:
        statement = self._forward.statements[position]
        self._comment(shown(statement.note) if statement.note else "")
        if not self._runs_fp8(position):
            code = self._kept(position)
            self._import(code)
            self._assign(position, code)
            return
        index, gemm = self._index[position], site_call(self._forward, position)
        parts = statement_text.linear_text(gemm, self._scope.text)
        name = self._kernels.recipes.linear(site_recipe(self._plans[index]))
        weight = or_frozen(index, parts.weight) if self._freeze_all([position]) else parts.weight
        operands = [parts.x, weight, parts.bias or "None", f"self.loka.counter_id({index})"]
        code = self._called(name, operands)
        self._import(code)
        self._assign_product(position, code, gemm.out)

    def _kept(self, position: int) -> str:
        """The unchanged expression of a statement."""
        return statement_text.expression(self._forward.statements[position].value, self._scope.text, ["self"])

    def _assign_product(self, position: int, code: str, out: Arg) -> None:
        """Assign the product to a GEMM's target, with the model's change of view."""
        if out == PRODUCT:
            self._assign(position, code)
            return
        product = self._scope.names.unique("product")
        self.lines += statement_text.assignment(product, code, INDENT, self._scope)
        self._assign(position, statement_text.view_text(out, product))

    def _freeze_all(self, positions: Sequence[int]) -> bool:
        """True if the weights of these GEMMs can be frozen, all or none: their fprop is in FP8.

        A weight that the forward computes is quantized in each call.
        """
        found: dict[int, str] = {}
        for position in positions:
            index, weight = self._index[position], site_call(self._forward, position).weight
            if site_recipe(self._plans[index]).fprop is None or locals_in(weight):
                return False
            text = text_of(weight)
            if any(each.get(index, text) != text for each in (found, self.freezable)):
                return False  # a site called twice with different views of its weight
            found[index] = text
        self.freezable |= found
        for text in found.values():
            self.imports |= statement_text.globals_of(text)
        return True

    def _called(self, function: str, arguments: Sequence[str]) -> str:
        """A call of a function in kernels.py."""
        return call(f"{self._kernels.module}.{function}", map(formatted, arguments))

    def _target(self, target: str) -> str | None:
        return self._scope.define(target) if target in self._used else None

    def _assign(self, position: int, code: str) -> None:
        """Assign to a statement's target, or return the value if it is the result."""
        if self._is_result(position):
            self.lines += statement_text.returned(code, INDENT, self._scope)
            self._returned = True
        else:
            target = self._target(self._forward.statements[position].target)
            self.lines += statement_text.assignment(target, code, INDENT, self._scope)

    def _is_result(self, position: int) -> bool:
        """True if a statement is the last one and its target is the forward's result."""
        statements = self._forward.statements
        return position == len(statements) - 1 and local(statements[position].target) == self._forward.result

    def _import(self, code: str) -> None:
        self.imports |= statement_text.globals_of(code)

    def _comment_notes(self, numbers: range) -> None:
        notes = dict.fromkeys(self._forward.statements[number].note for number in numbers)
        self._comment(", ".join(shown(note) for note in notes if note))

    def _comment(self, notes: str) -> None:
        """Write a comment with the origin of statements when it changes."""
        if notes and notes != self._note:
            self.lines += (" " * INDENT + "# " + line for line in wrapped(f"from {notes}", 10).split("\n"))
        self._note = notes


def _sliced(forward: ForwardIR, parameters: Sequence[str]) -> Iterator[str]:
    """The expressions of Parameters of which a forward reads several slices along the first dimension."""
    texts = {ref.text for step in forward.statements for ref in step.operands if ref.kind is RefKind.ATTRIBUTE}
    for name in parameters:
        expression = expression_of(name)
        if len({found for text in texts if (found := statement_text.slice_of(text, expression)) is not None}) > 1:
            yield expression


def _site_indices(forward: ForwardIR, sites: Sequence[str]) -> dict[int, int]:
    """Position of a GEMM's statement -> number of its site in the binding."""
    calls = [(n, statement.call.site) for n, statement in enumerate(forward.statements) if statement.call is not None]
    if [site for _, site in calls] == list(sites):
        return {position: index for index, (position, _) in enumerate(calls)}
    numbers = {site: index for index, site in enumerate(sites)}
    unknown = [site for _, site in calls if site not in numbers]
    if unknown:
        raise LokaError(
            f"the forward calls a site that its binding lacks: {unknown[0]!r}. Please report this fault in LoKA."
        )
    return {position: numbers[site] for position, site in calls}
