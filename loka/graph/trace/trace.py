"""Traces a module's forward to straight-line statements, or gives the reason why that is impossible.

Tracing runs on a copy that shares the stateless torch.nn children, so that a module with thousands of children is not
copied for one Parameter; the module itself is left unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from loka.errors import InputError
from loka.graph.canonical.forwards import canonical_forward
from loka.graph.canonical.recording import out_of_place as out_of_place_runs
from loka.graph.canonical.recording import recorded
from loka.graph.canonical.views import CannotEmitError
from loka.graph.capture.captured import CannotCaptureError, place_in
from loka.graph.equivalence import (
    difference,
    float64_difference,
    keeps_dtypes,
    rounding_difference,
)
from loka.graph.expression import Call, Ref, RefKind, locals_in, text_of
from loka.graph.fingerprint import Fingerprint, fingerprint
from loka.graph.ir import BatchNorm, CannotTraceError, Dropout, ForwardIR, Refused, Shape, Statement
from loka.graph.patterns.concat_norm import find_concat_norms
from loka.graph.patterns.dot_interaction import find_dot_interactions
from loka.graph.patterns.fm_interaction import find_fm_interactions
from loka.graph.patterns.near_interactions import find_near_misses
from loka.graph.patterns.norm import BATCH_NORM
from loka.graph.sites.weights import SiteWeight, find_weight
from loka.graph.source import has_hooks, has_running, qualified
from loka.graph.trace.casts import CASTS, telling_casts, with_wide_results
from loka.graph.trace.examples import Examples, missing_storage, quiet
from loka.graph.trace.observed_shapes import observed_shapes, with_even_statements
from loka.graph.trace.other_calls import other_conditions
from loka.graph.trace.out_of_place import out_of_place
from loka.graph.trace.printer import HIDING, attribute, constant, is_identifier
from loka.graph.trace.reading import other_situation, read_forward
from loka.graph.trace.statements import Printed
from loka.model.callables import message_of

_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "OptimizedModule", "ScriptModule"}


@quiet()
def trace_forward(
    module: nn.Module,
    owner: str,
    examples: Examples | Refused,
    inline: Collection[str] = (),
    sites: Collection[str] = (),
    quick: bool = False,
) -> ForwardIR | Refused:
    """The forward of `module`, named `owner` in its model, as statements that passed the equivalence check.

    `examples` are the model's calls of the module (`capture_examples`). `inline` names children, relative to the
    module, whose forwards are inlined, with the modules on the way to them. `sites` names what becomes a `SiteCall`,
    relative to the module: Parameters ("compress", "W_kernels.0") and nn.Linear children ("fmb.0"; these are inlined).
    Every site must be used in a GEMM that can be written as y = x @ weight.T, or the result is `Refused`; a reason that
    concerns one site starts with its quoted name. `quick`: only the quick check. Raises InputError where `inline` or
    `sites` name something that does not exist.
    """
    expand = expanded(module, inline, sites)

    def copied() -> nn.Module:
        return copy_owner(module, expand, share=quick)

    try:
        if isinstance(examples, Refused):
            return replace(examples, owner=owner)
        blocked = missing_storage(module)
        if blocked is not None:
            return Refused(owner, f"its forward cannot be checked: {blocked}")
        _check_source(module, expand)
        arguments = _arguments(module)
        reading = read_forward(module, expand, examples.calls, sites)
        weights = {site: _site_weight(module, site) for site in sites}
        printed = Printed(module, reading)
        written = ForwardIR(
            owner=owner,
            owner_type=qualified(type(module)),
            arguments=arguments,
            statements=tuple(printed.statements),
            result=printed.result,
            inlined=reading.called,
            guards=reading.conditions,
        )
        forward = out_of_place(written, printed.made)
        found = difference(module, forward, examples, copied, quick)
        if found is not None and (
            reading.is_split or (forward != written and not difference(module, written, examples, copied, quick))
        ):
            # As where a gradient is added up in another order or dtype: compared bit for bit as it is written.
            found = rounding_difference(module, forward, examples, copied, quick, contiguous=True)
        if found is not None:
            raise CannotTraceError(other_situation(module, expand, examples.calls) or found)
        if not quick:
            others = other_conditions(module, forward, examples, copied, reading.mode_dependent)
            forward = replace(forward, guards=tuple(dict.fromkeys((*forward.guards, *others))))
            forward = replace(forward, fingerprint=_fingerprint(module, forward.inlined, examples))
        taken, shapes = _canonical(_Traced(module, forward, examples, copied, quick), weights, printed.lines)
    except CannotTraceError as error:
        return Refused(owner, str(error), error.inside)
    return with_findings(with_torch_modules(taken, module, shapes), shapes)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A forward that passed the equivalence check."""

    module: nn.Module
    forward: ForwardIR
    examples: Examples
    copied: Callable[[], nn.Module]
    quick: bool


def _canonical(
    traced: _Traced, weights: Mapping[str, SiteWeight], lines: Mapping[str, tuple[str, int]]
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward in canonical form, and the shapes of its locals.

    `weights` has the weight of each site, `lines` the user's line of each target. Raises CannotTraceError for a forward
    without such a form, and for a site without a call.
    """
    module, forward, examples, copied = traced.module, traced.forward, traced.examples, traced.copied
    casts = telling_casts(forward, examples, copied)
    runs = recorded(forward, examples, copied, casts)
    if not runs:
        raise CannotTraceError("does other operations at another batch size")
    changed = out_of_place_runs(forward, runs)
    if changed is not None:
        where = f" {place_in(*lines[changed.target])}" if changed.target in lines else ""
        raise CannotTraceError(f"changes a tensor in place: {text_of(changed.value)}{where}")
    names, paths = _tensor_names(module), {id(parameter): name for name, parameter in module.named_parameters()}
    sites = {site: (paths[id(weight.parameter)], weight.index) for site, weight in weights.items()}
    shapes = observed_shapes(forward, examples, copied)
    try:
        found = canonical_forward(forward, shapes, runs, names, sites, casts)
    except CannotEmitError as error:
        raise CannotTraceError(f"makes a view that generated code cannot write {error}".rstrip()) from error
    problem = found.problem()
    if problem is not None:
        reason, target = problem
        where = f" {place_in(*lines[target])}" if target is not None and target in lines else ""
        raise CannotTraceError(reason + where)
    of_dtype = {parameter.dtype: names[name] for name, parameter in module.named_parameters() if name in names}
    made = with_wide_results(found.forward, forward, examples, copied, of_dtype)
    different = _difference(traced, made)
    if different is not None:
        raise CannotTraceError(different)
    return made, found.shapes


def _fingerprint(module: nn.Module, inlined: Collection[str], examples: Examples) -> Fingerprint:
    """The fingerprint of the module's own forward. Raises CannotTraceError where torch cannot read that."""
    first = examples.calls[0].batch
    calls = [(each.args, each.kwargs) for each in examples.calls if each.batch == first]
    others = [(each.args, each.kwargs) for each in examples.calls if each.batch != first]
    try:
        return fingerprint(module, inlined, calls, others)
    except CannotCaptureError as error:
        raise CannotTraceError(f"torch cannot read its forward, to compare it with a live model's: {error}") from error


def _difference(traced: _Traced, canonical: ForwardIR) -> str | None:
    """The first difference of a canonical form beyond rounding, in words; None without one.

    Casts that tell under autocast stay. Gradients are compared with ReLUs as they were traced, as any subgradient at 0
    is as good, and outputs with the ReLUs themselves.
    """
    module, examples, copied, quick = traced.module, traced.examples, traced.copied, traced.quick
    if not keeps_dtypes(canonical, examples, copied):
        return "gives other dtypes under autocast where its GEMMs are linears"
    casts = (step for step in traced.forward.statements if step.op in CASTS)
    to_one_dtype = any(len(step.operands) == 1 for step in casts)  # others follow that of a tensor
    found = None if to_one_dtype or quick else float64_difference(canonical, examples, copied)
    relus_as_traced = _with_traced_relus(canonical, traced.forward)
    found = found or rounding_difference(module, relus_as_traced, examples, copied, quick, contiguous=True)
    if found is not None or relus_as_traced == canonical:
        return found
    return rounding_difference(module, canonical, examples, copied, quick=True, contiguous=True)


def _with_traced_relus(canonical: ForwardIR, traced: ForwardIR) -> ForwardIR:
    """A canonical form with each ReLU as it was traced, where that reads what the form has, too."""
    written = {step.target: step for step in traced.statements}
    made = {name.partition("=")[0].lstrip("*") for name in canonical.arguments}
    statements = []
    for step in canonical.statements:
        other = written.get(step.target, step) if step.op == "relu" else step
        statements.append(other if made.issuperset(locals_in(other.value)) else step)
        made.add(step.target)
    return replace(canonical, statements=tuple(statements))


def _tensor_names(module: nn.Module) -> dict[str, str]:
    """The expressions of Parameters and buffers, by name. Others have no name to print."""
    found: dict[str, str] = {}
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        with suppress(CannotTraceError):
            found[name] = attribute(module, name)
    return found


def with_findings(forward: ForwardIR, shapes: Mapping[str, Shape]) -> ForwardIR:
    """The forward with the patterns found in it by the shapes of its locals."""
    mixes, joins = find_fm_interactions(forward, shapes), find_concat_norms(forward, shapes)
    even = with_even_statements(forward, shapes)
    found = replace(even, mixes=mixes, joins=joins, dots=find_dot_interactions(forward, shapes))
    return replace(found, near=find_near_misses(found, shapes))


def with_torch_modules(forward: ForwardIR, module: nn.Module, shapes: Mapping[str, Shape]) -> ForwardIR:
    """The forward with a `Dropout` or `BatchNorm` in statements that call one on a matrix.

    Others stay calls: subclasses, modules with hooks, and BatchNorms over the channels of several dimensions, called
    twice, without running statistics, or with a cumulative average, which reads a counter on the host.
    """
    called = Counter(step.value.target for step in forward.statements if isinstance(step.value, Call))
    found: dict[str, BatchNorm | nn.Dropout] = {}
    for name, child in module.named_modules():
        expression = attribute(module, name) if name and not has_hooks(child) else ""
        if expression and type(child) is nn.Dropout and 0.0 < child.p < 1.0:
            found[expression] = child
        elif expression and type(child) is nn.BatchNorm1d and called[expression] == 1 and has_running(child):
            vectors = (Ref(RefKind.ATTRIBUTE, f"{expression}.{vector}") for vector in ("weight", "bias"))
            weight, bias = vectors if child.affine else (None, None)
            found[expression] = BatchNorm(Ref(RefKind.ATTRIBUTE, expression), child.num_features, weight, bias)

    def marked(step: Statement) -> Statement:
        value = step.value
        shape = shapes.get(step.target, ())
        if not isinstance(value, Call) or step.op != "module" or len(shape) != 2 or len(step.operands) != 1:
            return step
        made = found.get(value.target)
        if made is None:
            return step
        if isinstance(made, BatchNorm):
            return replace(step, op=BATCH_NORM, called=made)
        dropout = Dropout(Ref(RefKind.ATTRIBUTE, value.target), made.p, shape[1] or 0)
        return replace(step, op="dropout", called=dropout)

    return replace(forward, statements=tuple(map(marked, forward.statements)))


def expanded(module: nn.Module, inline: Collection[str], sites: Collection[str]) -> frozenset[str]:
    """The children to trace through: `inline`, the linears of `sites`, and the modules on the way to each."""
    names = {id(child): name for name, child in module.named_modules()}
    expand: set[str] = set()
    for name in (*inline, *sites):
        try:
            found = module.get_submodule(name)
        except AttributeError:
            if name in inline or find_weight(module, name) is None:
                raise InputError(f"'{name}' is no child or Parameter of a {qualified(type(module))}") from None
            continue
        if not name:
            raise InputError("a module cannot be inlined into itself")
        parts = names[id(found)].split(".")
        expand.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return frozenset(expand)


def _check_source(module: nn.Module, expand: frozenset[str]) -> None:
    for name in ("", *sorted(expand)):
        found = _forbidden(module.get_submodule(name), name)
        if found is not None:
            raise CannotTraceError(found).inside_of(name)


def _forbidden(child: nn.Module, name: str) -> str | None:
    """Why a module's forward cannot be traced, "" being the owner, or a child's not inlined; None where it can."""
    shown = f"child '{name}'" if name else "the module"
    kinds = {base.__name__ for base in type(child).__mro__}
    if name and (kinds & _WRAPPERS):
        return f"{shown} is a {type(child).__name__}, whose forward cannot be inlined"
    if name and has_hooks(child):
        return f"{shown} has hooks, which would no longer run"
    if name and torch.nn.utils.parametrize.is_parametrized(child):
        return f"{shown} is parametrised"
    if "forward" in vars(child):
        return f"the forward of {shown} was replaced on the instance"
    if type(child).__call__ is not nn.Module.__call__ or child._compiled_call_impl is not None:
        return f"{shown} has a __call__ of its own"
    return None


def copy_owner(module: nn.Module, expand: frozenset[str], share: bool = False) -> nn.Module:
    """A deep copy that shares the stateless torch.nn children outside `expand`; `share`: all Parameters too.

    Raises CannotTraceError.
    """
    memo: dict[int, object] = {id(parameter): parameter for parameter in module.parameters()} if share else {}
    for child in _shareable(module, "", expand):
        memo[id(child)] = child
        memo.update((id(parameter), parameter) for parameter in child.parameters())
    try:
        copied: object = copy.deepcopy(module, memo)
    except Exception as error:  # __deepcopy__ and pickling hooks of the user's classes can raise anything
        raise CannotTraceError(f"the module cannot be copied ({type(error).__name__}: {message_of(error)})") from error
    if not isinstance(copied, nn.Module):
        raise CannotTraceError(f"the module cannot be copied (copy.deepcopy made a {type(copied).__name__} of it)")
    return copied


def _shareable(module: nn.Module, path: str, expand: frozenset[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if below not in expand and all(map(_is_stateless, child.modules())):
            yield child
        else:
            yield from _shareable(child, below, expand)


def _is_stateless(module: nn.Module) -> bool:
    plain = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, nn.RNNBase)
    return plain and not has_hooks(module) and not module._buffers and getattr(module, "max_norm", None) is None


def _site_weight(module: nn.Module, site: str) -> SiteWeight:
    weight = find_weight(module, site)
    if weight is None:
        weight = SiteWeight(module.get_submodule(site).get_parameter("weight"))
    if len(weight.shape) < 2:
        raise CannotTraceError(f"'{site}' has {len(weight.shape)} dimensions, not 2")
    return weight


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """forward's arguments with their defaults, with "/", "*" and "**" as in the signature."""
    printed: list[str] = []
    kinds = inspect.Parameter
    previous: object = kinds.POSITIONAL_ONLY
    signature = inspect.signature(module.forward)
    for name, parameter in signature.parameters.items():
        if name in HIDING or not is_identifier(name):
            raise CannotTraceError(f"argument '{name}' has a name that the generated text needs for itself")
        if previous is kinds.POSITIONAL_ONLY and parameter.kind is not previous and printed:
            printed.append("/")
        if parameter.kind is kinds.KEYWORD_ONLY and previous not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            printed.append("*")
        previous = parameter.kind
        mark = "*" * ((parameter.kind is kinds.VAR_POSITIONAL) + 2 * (parameter.kind is kinds.VAR_KEYWORD))
        default = "" if parameter.default is kinds.empty else f"={constant(parameter.default)}"
        printed.append(mark + name + default)
    if previous is kinds.POSITIONAL_ONLY and printed:
        printed.append("/")
    return tuple(printed)
