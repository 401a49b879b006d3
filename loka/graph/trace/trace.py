"""Traces a module's forward to straight-line statements, or gives the reason why that is impossible.

Tracing runs on a copy that shares the stateless torch.nn children, so that a module with thousands of children is not
copied for one Parameter; the module itself is left unchanged.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from loka.errors import InputError
from loka.graph.canonical.forwards import canonical_forward, is_canonical, with_traced_relus
from loka.graph.canonical.recording import recorded
from loka.graph.equivalence import difference, rounding_difference
from loka.graph.ir import CannotTraceError, ForwardIR, Refused, Shape
from loka.graph.patterns.concat_norm import find_concat_norms
from loka.graph.patterns.cross import find_crosses
from loka.graph.patterns.fm_interaction import find_fm_interactions
from loka.graph.patterns.near_interactions import find_near_misses
from loka.graph.reads import Traced, constants_of, reads_of
from loka.graph.sites.weights import SiteWeight, find_weight
from loka.graph.source import forward_source_hash, functions_of, has_hooks, live_floats, qualified
from loka.graph.trace.casts import telling_casts
from loka.graph.trace.examples import Examples, missing_storage, quiet
from loka.graph.trace.fx_recording import FxRecording, fx_record
from loka.graph.trace.in_place import DEFAULT_WRITES, Writes
from loka.graph.trace.lint import code_place, lint, out_of_place, unreadable
from loka.graph.trace.observed_shapes import observed_shapes, with_even_statements
from loka.graph.trace.printer import HIDING, attribute, constant, is_identifier
from loka.graph.trace.site_calls import with_contiguous_products
from loka.graph.trace.statements import Printed
from loka.graph.trace.traced_weights import find_weights, unused_reason
from loka.model.callables import message_of

_DEVICE = re.compile(r"(cpu|cuda|meta)(:\d+)?")
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
        forward, recording = _convert(module, owner, expand, sites, examples)
        found = difference(module, forward, examples, copied, quick)
        if found is not None and recording.writes_in_place:  # as under autocast, where `y += x` keeps y's dtype
            made = forward
            forward, _ = _convert(module, owner, expand, sites, examples, Writes(in_place=True))
            found = difference(module, forward, examples, copied, quick)
            for each, in_place in ((made, False), (forward, True)) if found is not None else ():
                # As where a gradient is added up in another order or dtype: compared bit for bit as it is written.
                written, _ = _convert(module, owner, expand, sites, examples, Writes(in_place, as_written=True))
                if difference(module, written, examples, copied, quick) is None:
                    forward, found = each, rounding_difference(module, each, examples, copied, quick, contiguous=True)
                    break
        if found is not None and (copying := with_contiguous_products(forward)) != forward:
            forward, found = copying, difference(module, copying, examples, copied, quick)
        if found is not None:
            raise CannotTraceError(recording.of_dtype or found)
    except CannotTraceError as error:
        return Refused(owner, str(error), error.inside)
    shapes = observed_shapes(forward, examples, copied)
    canonical, all_shapes = _canonical(module, forward, shapes, examples, copied, quick)
    whole = next((step.call.site for step in canonical.statements if step.call and step.call.plus), None)
    if whole is not None:
        return Refused(owner, f"'{whole}' goes into a product with a sum that cannot be told from it")
    return with_findings(canonical, all_shapes)


def _canonical(
    module: nn.Module,
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    examples: Examples,
    copied: Callable[[], nn.Module],
    quick: bool,
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward in canonical form, if that computes the same up to rounding, else as traced; and its shapes.

    Casts that tell under autocast stay. Gradients are compared with ReLUs as they were traced, as any subgradient at 0
    is as good, and outputs with the ReLUs themselves.
    """
    casts = telling_casts(forward, examples, copied)
    runs = recorded(forward, examples, copied, casts, _live_floats(module, forward.inlined))
    found, all_shapes = canonical_forward(forward, shapes, runs, _tensor_names(module), casts)
    if not is_canonical(found):
        return forward, shapes
    relus_as_traced = with_traced_relus(found)  # any subgradient at 0 is as good
    if rounding_difference(module, relus_as_traced, examples, copied, quick, contiguous=True):
        return forward, shapes
    if relus_as_traced != found and rounding_difference(module, found, examples, copied, quick=True, contiguous=True):
        return forward, shapes
    return found, all_shapes


def _tensor_names(module: nn.Module) -> dict[str, str]:
    """The expressions of Parameters and buffers, by name. Others have no name to print."""
    found: dict[str, str] = {}
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        with suppress(CannotTraceError):
            found[name] = attribute(module, name)
    return found


def _live_floats(module: nn.Module, inlined: Collection[str]) -> frozenset[str]:
    """The expressions of float attributes that each call reads anew."""
    children = {path: module.get_submodule(path) for path in ("", *inlined)}
    names = (
        f"{path}.{name}".lstrip(".")
        for path, child in children.items()
        for name in live_floats(child, functions_of(child))
    )
    return frozenset(attribute(module, name) for name in names)


def with_findings(forward: ForwardIR, shapes: Mapping[str, Shape]) -> ForwardIR:
    """The forward with the patterns found in it by the shapes of its locals."""
    mixes, joins = find_fm_interactions(forward, shapes), find_concat_norms(forward, shapes)
    crosses = find_crosses(forward, shapes)
    found = replace(with_even_statements(forward, shapes), mixes=mixes, joins=joins, crosses=crosses)
    return replace(found, near=find_near_misses(found, shapes))


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
    return unreadable(child)


def _recorded(module: nn.Module, expand: frozenset[str], examples: Examples, writes: Writes) -> FxRecording:
    """The recording of a module's forward. What its source loses in a trace is the reason rather than what follows."""
    own = functions_of(module)[:1]
    entered = set(map(code_place, own))
    found = lint(module, entered)  # before it runs with traced values: its prints and host reads
    if found is not None:
        raise CannotTraceError(found).inside_of("")
    flags = [(child, child.training) for child in module.modules()]
    copied = copy_owner(module, expand)
    failed: CannotTraceError | None = None
    try:
        recording = fx_record(copied, expand, examples.calls, writes, entered)
    except CannotTraceError as error:
        failed = error
    finally:
        for child, flag in flags:
            child.training = flag
    for name in ("", *sorted(expand)):
        found = lint(module.get_submodule(name), entered)
        if found is not None:
            raise CannotTraceError(found).inside_of(name)
    if failed is not None:
        raise failed
    device = _device_read(module, recording.reads)
    if device is not None:
        raise CannotTraceError(
            f"the forward reads the device in '{device[1]}', which would be frozen at that of planning"
        ).inside_of(device[0] if device[0] in expand else "")
    return recording


def _device_read(module: nn.Module, reads: Mapping[str, Collection[str]]) -> tuple[str, str] | None:
    """The first attribute read that holds a device, and its module: a model is planned and trained on two machines."""
    for path, names in sorted(reads.items()):
        held = vars(module.get_submodule(path))
        for name in sorted(set(names) & held.keys()):
            value = held[name]
            if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
                return path, ".".join(filter(None, ("self", path, name)))
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


def _convert(
    module: nn.Module,
    owner: str,
    expand: frozenset[str],
    sites: Collection[str],
    examples: Examples,
    writes: Writes = DEFAULT_WRITES,
) -> tuple[ForwardIR, FxRecording]:
    """The printed forward, and its recording; `writes` says how a statement of the form `y += x` is recorded."""
    recording = _recorded(module, expand, examples, writes)
    weights = find_weights(module, recording.ops, {site: _site_weight(module, site) for site in sites})
    printed = Printed(module, recording, weights)
    missing = [site for site in sites if not any(s.call and s.call.site == site for s in printed.statements)]
    if missing:
        raise CannotTraceError(recording.of_dtype or unused_reason(missing[0], weights, recording.ops))
    forward = ForwardIR(
        owner=owner,
        owner_type=qualified(type(module)),
        arguments=_arguments(module),
        statements=tuple(printed.statements),
        result=printed.result,
        inlined=recording.called,
        guards=printed.guards,
        source_hash=_hash(module, recording.called),
    )
    made = out_of_place(forward, printed.made, sums=not writes.as_written)
    relied = printed.made.values() if made != out_of_place(forward) else ()
    called = tuple(dict.fromkeys(str(op.node.target) for op in recording.ops if op.node.op == "call_module"))
    reads = reads_of(module, Traced(recording.reads, expand, recording.called, called, frozenset(relied)))
    found = replace(made, reads=reads, called=called, constants=constants_of(module, recording.called, reads))
    return found, recording


def _site_weight(module: nn.Module, site: str) -> SiteWeight:
    weight = find_weight(module, site)
    if weight is None:
        weight = SiteWeight(module.get_submodule(site).get_parameter("weight"))
    if len(weight.shape) < 2:
        raise CannotTraceError(f"'{site}' has {len(weight.shape)} dimensions, not 2")
    return weight


def _hash(module: nn.Module, inlined: tuple[str, ...]) -> str:
    try:
        return forward_source_hash(module, inlined)
    except OSError as error:
        raise CannotTraceError("the source of the forward cannot be read") from error


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
