"""Check that a package fits a live model and its machine: all problems, found before anything changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from loka.dispatch.bind.bound import Binding, Bound, is_flat, is_sharded, shown_type
from loka.dispatch.bind.wrappers import ClosedWrapperError, find_module
from loka.errors import InputError
from loka.graph.capture.captured import CannotCaptureError
from loka.graph.fake_module import likeness
from loka.graph.fingerprint import changed_forward
from loka.graph.source import in_script, same_type
from loka.graph.wrappers import inside, unsharded_class
from loka.kernels.gemm.catalogue import kernel_named
from loka.kernels.gemm.library import has_fp8
from loka.mods.structure import plain_name

AGAIN = "run loka generate again"
BACK = "change it back, or remove the patch and run loka generate again"
BOUND_ALREADY = "is bound already: remove the first patch (patch.remove())"

_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}


@dataclass(frozen=True, slots=True)
class ModuleMatch:
    """A module of the live model and its binding."""

    name: str
    module: nn.Module
    binding: Binding
    sites: tuple[str, ...]


@dataclass(slots=True)
class ForwardCheck:
    """Compares live modules' own forwards with the planned ones; modules that are alike once."""

    advice: str  # what to do about a difference
    _known: dict[object, str | None] = field(default_factory=dict)

    def problem(self, module: nn.Module, binding: Binding) -> str | None:
        """The first difference, with the advice; None without any, and for a forward that was not traced."""
        shapes = dict(binding.shapes)
        pieces = any(is_flat(parameter) and name not in shapes for name, parameter in module.named_parameters())
        if binding.fingerprint is None or pieces:  # of what is called: compared before it was taken to pieces
            return None
        alike = likeness(module)
        key = None if alike is None else (id(binding), alike)
        if key is None or key not in self._known:
            try:
                found = changed_forward(module, binding.inlined, binding.fingerprint, shapes)
                self._known[key] = None if found is None else f"{found}: {self.advice}"
            except CannotCaptureError as error:
                self._known[key] = f"its own forward cannot be compared with the planned one: {error}"
        return self._known[key]


def match_modules(root: nn.Module, bindings: Sequence[Binding], mode: str) -> tuple[list[ModuleMatch], list[str]]:
    """The modules named in the bindings, and all reasons why some cannot be bound; `root` is unchanged."""
    matches: list[ModuleMatch] = []
    problems: list[str] = []
    seen: dict[int, str] = {}
    names: list[str] = []
    taken, check = _inlined_already(root), ForwardCheck(AGAIN)
    for binding in bindings:
        if mode == "infer" and not binding.infer:
            continue
        for name, sites in zip(binding.modules, binding.sites, strict=True):
            try:
                module = find_module(root, name)
            except ClosedWrapperError as error:
                problems.append(f"{shown(name)}: lies in {error}, which changes what it holds: apply before wrapping")
                continue
            if module is None:
                names = names or [plain_name(known) for known, _ in root.named_modules() if known]
                problems.append(f"{shown(name)}: the model has no such module{_nearest(name, names)}: {AGAIN}")
                continue
            if id(module) in seen:
                problems.append(f"{shown(name)}: is the same module as {shown(seen[id(module)])}")
                continue
            seen[id(module)] = name
            if id(module) in taken:
                problems.append(
                    f"{shown(name)}: is inlined into {shown(taken[id(module)])}, which is bound already: remove the "
                    "first patch (patch.remove())"
                )
                continue
            found = list(_problems(module, binding, mode, check))
            problems += [f"{shown(name)}: {problem}" for problem in found]
            if not found:
                matches.append(ModuleMatch(name, module, binding, sites))
    for match in matches:
        for child in match.binding.inlined:
            if (bound := seen.get(id(match.module.get_submodule(child)))) is not None:
                problems.append(f"{shown(bound)}: is inlined into {shown(match.name)}, so it cannot be bound too")
    return matches, problems


def _inlined_already(root: nn.Module) -> dict[int, str]:
    """The children whose own forward a bound module does not call, by id, with that module's name."""
    return {
        id(child): plain_name(name)
        for name, module in root.named_modules()
        if isinstance(module, Bound)
        for path in module.loka.binding.inlined
        if (child := below(module, path)) is not None
    }


def child_problems(module: nn.Module, binding: Binding) -> Iterator[str]:
    """Problems of a module's inlined children, whose own forward is not called: hooks, parametrisations and so on."""
    for name in binding.inlined:
        child = below(module, name)
        if child is None and in_wrapper(module, name):
            continue  # reported with the module that is wrapped
        if child is None:
            yield f"has no child {name!r}, whose forward is part of the generated one"
            continue
        if inside(child) is not None:
            yield (
                f"its child {name!r} is wrapped ({type(child).__name__}), and its forward is part of the generated "
                "one: wrap the module around it instead"
            )
            continue
        for attribute, kind in _HOOKS.items():
            if getattr(child, attribute, None):
                yield f"its child {name!r} has {kind}, which would not fire: its forward is part of the generated one"
        if "parametrizations" in child._modules:
            yield f"its child {name!r} is parametrised: remove the parametrisation, or keep its sites in the policy"
        if unsharded_class(type(child)) is not type(child):
            unit = name if binding.modules == ("",) else f"*.{name}"
            yield (
                f"its child {name!r} is an FSDP unit of its own: shard the module around it instead, or write units: "
                f'["{unit}"] in the policy and run loka generate again'
            )
        if "forward" in vars(child):
            yield f"its child {name!r} has a forward of its own on the instance"
        if isinstance(child, Bound):
            yield f"its child {name!r} is bound already"


def changes_since(module: nn.Module, binding: Binding, check: ForwardCheck) -> Iterator[str]:
    """Changes in a module since it was bound that its generated forward does not reflect."""
    found = [*lost_parameters(module, binding), *child_problems(module, binding)]
    if not found and (problem := check.problem(module, binding)):
        found.append(problem)
    yield from found


def lost_parameters(module: nn.Module, binding: Binding) -> Iterator[str]:
    """Planned parameters that a bound module no longer has, or has with another shape."""
    children: dict[str, nn.Module | None] = {}
    for name, shape in binding.shapes:
        path, _, own = name.rpartition(".")
        child = children[path] if path in children else children.setdefault(path, below(module, path))
        if child is None:
            continue  # reported by `child_problems`
        found = child._parameters.get(own)
        if found is None:  # a parametrised parameter is computed, also in the generated forward
            found = getattr(child, own, None)
        if not isinstance(found, torch.Tensor):
            yield f"has no parameter {name!r}, planned with shape {shape}: {BACK}"
        elif tuple(found.shape) != shape and not is_flat(found):
            yield f"{name} has shape {tuple(found.shape)}, planned was {shape}: {BACK}"
    if binding.fingerprint is None and "bias" not in dict(binding.shapes) and getattr(module, "bias", None) is not None:
        yield f"has a bias that the generated forward does not add: {BACK}"


def below(module: nn.Module, path: str) -> nn.Module | None:
    """The child at a dotted path, the module itself for ""; None if there is none."""
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        found = found._modules.get(part) if found is not None else None
    return found


def in_wrapper(module: nn.Module, path: str) -> bool:
    """True if the child at a dotted path, or a module on the way to it, is in a wrapper, such as torch.compile's."""
    parts = path.split(".")
    on_the_way = (below(module, ".".join(parts[: end + 1])) for end in range(len(parts)))
    return any(child is not None and inside(child) is not None for child in on_the_way)


def _problems(module: nn.Module, binding: Binding, mode: str, check: ForwardCheck) -> Iterator[str]:
    """Reasons why one module cannot be bound."""
    if isinstance(module, Bound):
        yield BOUND_ALREADY
        return
    if torch.nn.utils.parametrize.is_parametrized(module):
        yield "is parametrised: remove the parametrisation, or keep its sites in the policy"
        return
    cls = unsharded_class(type(module))
    if not same_type(cls, binding.replaces):
        moved = "import it from there, or name this script in the policy and " if in_script(cls.__module__) else ""
        yield f"is a {shown_type(cls)}, planned was {binding.replaces}: {moved}run loka generate again"
        return
    if "forward" in vars(module):
        yield (
            "has a forward of its own on the instance, which would win over the generated one: apply before it is set "
            "(Accelerate's prepare sets one for mixed precision), or remove it first"
        )
        return
    found = list(child_problems(module, binding))
    if not found and (problem := check.problem(module, binding)):
        found.append(problem)
    yield from found
    yield from _shape_problems(module, binding, mode)
    yield from _unplanned(module, binding) if binding.fingerprint is None else ()
    if hasattr(module, "loka"):
        yield "has an attribute 'loka', which a bound module needs for itself"


def _shape_problems(module: nn.Module, binding: Binding, mode: str) -> Iterator[str]:
    for name, shape in binding.shapes:
        try:
            parameter = module.get_parameter(name)
        except AttributeError:
            yield f"has no parameter {name!r}, planned with shape {shape}"
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield f"{name} has no shape yet (a lazy module): run the model once before apply"
            continue
        if parameter.layout is not torch.strided:
            yield f"{name} is {parameter.layout}, and kernels read dense weights: make it dense"
        if tuple(parameter.shape) != shape:
            yield f"{name} has shape {tuple(parameter.shape)}, planned was {shape}: run loka generate again"
        if mode == "infer" and is_sharded(parameter):
            yield f"{name} is sharded: apply mode='infer' to the whole model, before fully_shard"


def _unplanned(module: nn.Module, binding: Binding) -> Iterator[str]:
    """Parameters that the generated forward would ignore, for example a bias added since."""
    planned = {name for name, _ in binding.shapes}
    for child in ("", *binding.inlined):
        try:
            parameters = module.get_submodule(child).named_parameters(recurse=False)
        except AttributeError:
            continue  # reported by child_problems
        for own, _ in parameters:
            name = f"{child}.{own}" if child else own
            if name not in planned:
                yield f"has a parameter {name!r} that the plan does not know: run loka generate again"


def shown(name: str) -> str:
    """A module's name in messages."""
    return f"'{name}'" if name else "the model itself"


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=2)
    return f" (nearest: {', '.join(close)})" if close else ""


SHOWN = 3  # most sites named for a kernel


def library_problems(matches: Iterable[ModuleMatch], mode: str) -> list[str]:
    """A line for each planned kernel that cannot run on the modules' devices: reason, sites, advice.

    On the CPU and on GPUs without FP8 every kernel runs by its reference; only an unknown kernel is a problem there.
    """
    planned: dict[str, dict[str, bool]] = {}  # kernel -> site -> True if it is on a GPU with FP8
    for match in matches:
        for site, gemms in zip(match.sites, match.binding.in_mode(mode), strict=True):
            for kernel in (name for names in gemms.values() for name in names):
                planned.setdefault(kernel, {})[site] = _on_fp8(match.module)
    problems = []
    for kernel, sites in planned.items():
        reason = _unsupported_reason(kernel, any(sites.values()))
        if reason is not None:
            problems.append(
                f"kernel {kernel!r}, planned for {_listed(list(sites))}: {reason}; or write another `kernel` or "
                "`compute: keep` for these sites in the policy and run loka generate again"
            )
    return problems


def _unsupported_reason(name: str, on_fp8: bool) -> str | None:
    try:
        kernel = kernel_named(name)
    except InputError as error:
        return f"{error}; upgrade LoKA"
    return kernel.unavailable_reason() if on_fp8 else None


def _on_fp8(module: nn.Module) -> bool:
    devices = {parameter.device for parameter in module.parameters()}
    return any(device.type == "cuda" and has_fp8(device.index) for device in devices)


def _listed(sites: list[str]) -> str:
    shown = ", ".join(repr(site) for site in sites[:SHOWN])
    return shown if len(sites) <= SHOWN else f"{shown} and {len(sites) - SHOWN} more"
