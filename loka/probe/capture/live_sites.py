"""The sites of a policy's model in the live one, through the wrappers that training puts around modules.

`find_live` maps them by name; `SiteCalls` finds the one that a torch function's call belongs to, by the weight that it
multiplies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import basename
from types import FrameType
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.errors import InputError
from loka.graph.sites.site import GemmKind, Site
from loka.graph.sites.weights import SiteWeight, in_range
from loka.graph.wrappers import class_names, inside
from loka.model.callables import is_library_file
from loka.mods.adapt import AdaptError, is_adapted
from loka.mods.adaptation import Adaptation
from loka.mods.structure import unwrapped
from loka.probe.capture.operand_views import OperandProduct, find_product, products_of_groups

PROBED = frozenset((GemmKind.LINEAR, GemmKind.FUNCTIONAL_LINEAR, GemmKind.MATMUL, GemmKind.ADDMM, GemmKind.EINSUM))

# Wrapper classes and the attribute with the wrapped module: the policy's model does not have them.
_REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "FullyShardedDataParallel flattens and shards its parameters: probe it before it is wrapped, or under DDP"
    ),
    "torch.nn.parallel.data_parallel.DataParallel": (
        "nn.DataParallel runs copies of the model in threads: use DistributedDataParallel"
    ),
    "torch.jit._script.ScriptModule": (
        "torch.jit.script runs without Python, so that nothing of it can be watched: probe the module itself"
    ),
}


@runtime_checkable
class LiveCounters(Protocol):
    """Attribute `loka` of a module patched by a generated package: the counter ids of its GEMMs."""

    sites: tuple[str, ...]
    gemms: tuple[tuple[str, ...], ...]  # for each site, the GEMMs that run in FP8

    def counter_id(self, index: int) -> int:
        """The counter id of the site's fprop; dgrad is one more, wgrad two."""


@dataclass(frozen=True, slots=True)
class LiveSite:
    """A site of the policy's model and its weight in the live one."""

    site: Site
    weight: SiteWeight
    module: nn.Module | None  # the module whose forward runs for the site: the nn.Linear, otherwise the owner
    counter_id: int | None = None  # counter id of its fprop, if a generated package runs it in FP8
    fp8: tuple[str, ...] = ()  # the GEMMs that then run in FP8

    @property
    def is_sharded(self) -> bool:
        """True if `fully_shard` has left this rank a part of the weight."""
        return _is_sharded(self.weight.parameter)

    @property
    def matrix(self) -> Tensor:
        """The weight's values: (N, K) or (K, N) of two dimensions, (N, K) of more. Collective if it is sharded."""
        if self.is_sharded:
            whole: Any = self.weight.parameter
            return SiteWeight(whole.full_tensor()).value
        if len(self.weight.shape) == 2:
            return self.weight.value
        folded = self.weight.matrix(self.site.n, self.site.k)
        return self.weight.value if folded is None else folded

    @property
    def key(self) -> WeightKey:
        """What `weight_key` gives for the site's weight and its transpose."""
        parameter, part = self.weight.parameter, self.weight.value
        if not self.weight.index:
            return id(parameter), None, ()
        return id(parameter), int(part.storage_offset() - parameter.storage_offset()), tuple(part.shape[-2:])

    def transposes(self, weight: Tensor) -> bool:
        """True if an operand with the site's key is the transpose of its weight, rather than the weight itself."""
        parameter = self.weight.parameter
        if not self.weight.index:
            return weight is not parameter
        return weight.stride() != parameter.stride()[-2:] or tuple(weight.shape) != self.weight.shape


def _is_sharded(parameter: nn.Parameter) -> bool:
    # By name: importing torch.distributed.tensor is slow.
    return any(base.__name__ == "DTensor" for base in type(parameter).__mro__)


# A Parameter's id, and the offset and the shape of a matrix in it: None and () for a Parameter of two dimensions.
WeightKey = tuple[int, int | None, tuple[int, ...]]


def weight_key(tensor: Tensor) -> WeightKey:
    """The key of the Parameter, or the matrix in one, that a tensor is or transposes; of the tensor itself for others.

    Parameters stay alive with their sites, so that ids are theirs.
    """
    base = tensor._base
    if base is None or tensor.dim() != 2 or base.dim() < 2 or tensor.stride() not in _strides(base):
        return id(tensor), None, ()
    straight = tensor.stride() == base.stride()[-2:]
    shape, offset = tuple(tensor.shape), int(tensor.storage_offset() - base.storage_offset())
    shape = shape if straight else shape[::-1]
    if base.dim() == 2 and shape == tuple(base.shape):
        return id(tensor) if straight else id(base), None, ()
    return id(base), offset, shape


def _strides(base: Tensor) -> tuple[tuple[int, ...], ...]:
    """The strides of a matrix in a tensor, and of its transpose."""
    down, across = base.stride()[-2:]
    return (down, across), (across, down)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The live model without its wrappers; `sites` can be probed; `others` share a Parameter with one."""

    root: nn.Module
    sites: tuple[LiveSite, ...]
    others: tuple[LiveSite, ...]


def find_live(model: nn.Module, sites: tuple[Site, ...]) -> LiveModel:
    """Map sites to a live model by name.

    Sites without a weight of two dimensions, and those that cannot be patched, are left out.

    Raises:
        InputError: A wrapper or Parameter that cannot be observed, a missing Parameter, or one with another shape than
            in the model that the policy builds.
    """
    root = unwrap(model, "the model")
    patched = dict(_patched(root))
    units = any("torch.distributed.fsdp.FSDPModule" in class_names(module) for module in root.modules())
    found, rest = [], []
    for site in sites:
        if site.weight is None or site.kind not in PROBED:
            continue
        if site.blocked is not None:
            weight = _weight(root, site.weight)
            if weight is not None and not (weight.index and _is_sharded(weight.parameter)):
                rest.append(LiveSite(site, weight, _module_of(root, site)))
            continue
        weight = _checked(root, site, units)
        counter_id, fp8 = patched.get(site.name, (None, ()))
        found.append(LiveSite(site, weight, _module_of(root, site), counter_id, fp8))
    shared = {live.key for live in found}
    others = tuple(live for live in rest if live.key in shared)
    return LiveModel(root, tuple(found), others)


def check_adapted(model: nn.Module, adaptations: Sequence[Adaptation]) -> None:
    """Raises InputError if the policy's mods have not been applied to a live model."""
    if not adaptations:
        return
    try:
        with unwrapped(model, lambda module: unwrap(module, "a part of the model")) as root:
            done = is_adapted(root, adaptations)
    except AdaptError as error:
        raise InputError(f"probe: the policy's mods do not fit the model: {error}") from error
    if not done:
        count = sum(len(adaptation.modules) for adaptation in adaptations)
        raise InputError(
            f"probe: the policy's mods change {count} modules, {adaptations[0].modules[0]!r} among them, and the model "
            "is as it was before: call adapt(model) of the generated package first, before the optimizer is made"
        )


def unwrap(module: nn.Module, name: str) -> nn.Module:
    """The module inside any number of torch.compile, DDP, torchrec DMP and activation-checkpoint wrappers.

    Raises InputError, with `name`, for a wrapper that hides the operations inside.
    """
    while True:
        reason = next((_REFUSED[each] for each in class_names(module) if each in _REFUSED), None)
        if reason is not None:
            raise InputError(f"probe: {name} cannot be probed: {reason}")
        wrapped = inside(module)
        if wrapped is None:
            return module
        module = wrapped


def find_module(root: nn.Module, name: str) -> nn.Module | None:
    """The module of a qualified name ("" is `root`), skipping wrappers on the way; None where there is none."""
    module = root
    for part in name.split(".") if name else ():
        child = module._modules.get(part)
        if child is None:
            return None
        module = unwrap(child, f"the module of {name!r}")
    return module


def _weight(root: nn.Module, name: str) -> SiteWeight | None:
    """The weight of a name; the last parts may be the indices of a matrix in a Parameter."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = find_module(root, ".".join(parts[: end - 1]))
        parameter = None if module is None else module._parameters.get(parts[end - 1])
        if parameter is not None:
            index = in_range(parts[end:], parameter.shape)
            return None if index is None else SiteWeight(parameter, index)
        if not parts[end - 1].isdecimal():
            return None
    return None


def _module_of(root: nn.Module, site: Site) -> nn.Module | None:
    return find_module(root, site.name if site.kind is GemmKind.LINEAR else site.owner)


def _checked(root: nn.Module, site: Site, units: bool) -> SiteWeight:
    weight = _weight(root, cast("str", site.weight))
    shape = (site.n, site.k)
    if weight is None:
        raise InputError(
            f"probe: site {site.name!r}: the model has no Parameter {site.weight!r} (of {shape[0]} x {shape[1]}): "
            f"probe the model that the policy's model.factory builds, or correct the policy"
        )
    parameter = weight.parameter
    placements = getattr(parameter, "placements", ())
    if placements and (not units or sum(each.is_shard() for each in placements) != 1):
        raise InputError(
            f"probe: site {site.name!r}: its Parameter {site.weight!r} is a DTensor of other parallelism than "
            "fully_shard's: probe the model before it is sharded, or under DDP"
        )
    if placements and (weight.index or len(weight.shape) != 2):
        raise InputError(
            f"probe: site {site.name!r}: its Parameter {site.weight!r} is a matrix in one of more dimensions, which is "
            "sharded (DTensor): probe the model before it is sharded, or under DDP"
        )
    # x @ P has it the other way around.
    folded = len(weight.shape) > 2 and weight.matrix(*shape) is not None
    if (weight.shape not in (shape, shape[::-1]) and not folded) or (
        site.kind is GemmKind.LINEAR and weight.shape != shape
    ):
        raise InputError(
            f"probe: site {site.name!r}: its Parameter {site.weight!r} is of shape {weight.shape}, but in "
            f"the model that the policy builds {shape}: give the policy's factory the sizes of the model that trains"
        )
    if parameter.is_meta:
        raise InputError(
            f"probe: site {site.name!r}: its Parameter {site.weight!r} is on the meta device, without values: put the "
            f"model on the device that it trains on (model.to_empty(device=...)) and give it its weights first"
        )
    return weight


def _patched(root: nn.Module) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """The sites that a generated package runs, with their counter ids and FP8 GEMMs."""
    for module in root.modules():
        counters = vars(module).get("loka")
        if isinstance(counters, LiveCounters):
            for index, name in enumerate(counters.sites):
                yield name, (counters.counter_id(index), counters.gemms[index])


class _Running(threading.local):
    """Names of the modules whose forward runs in this thread; a checkpoint's recomputation may have its own thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


class SiteCalls:
    """The sites of a live model by weight; between `start` and `stop` it also tells apart those that share one."""

    def __init__(self, live: LiveModel) -> None:
        self._root = live.root
        self._sites = _by_weight([*live.sites, *live.others])
        self._sharded = [site for site in (*live.sites, *live.others) if site.is_sharded]
        self._running = _Running()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Follow which modules run, as far as sites share a Parameter."""
        self._running = _Running()
        for live in (each for sharing in self._sites.values() if len(sharing) > 1 for each in sharing):
            if live.module is not None:
                self._hooks += _tell(live.module, _module_name(live), self._running)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def products(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[OperandProduct]:
        """The products of an input and a site's Parameter in a call; several where it holds a matrix for each group."""
        found = find_product(function, args, kwargs, self._is_weight)
        return products_of_groups(function, args, kwargs, self._is_weight) if found is None else [found]

    def sharing(self, product: OperandProduct) -> list[LiveSite]:
        """The sites of a product's Parameter."""
        return self._sites[weight_key(product.weight)]

    def choose(self, product: OperandProduct, frame: FrameType) -> LiveSite | None:
        """The site that a call belongs to, made in `frame`; None if that is ambiguous."""
        candidates = self.sharing(product)
        fitting = [live for live in candidates if (live.site.k, live.site.n) == (product.k, product.n)]
        if len(candidates) == 1 or not fitting:
            return fitting[0] if fitting else None
        running = self._running.names[-1] if self._running.names else None
        for live in fitting:
            if live.site.kind is GemmKind.LINEAR and live.site.name == running:
                return live
        where = _place(frame)
        there = [live for live in fitting if live.site.kind is not GemmKind.LINEAR and live.site.where == where]
        if len(there) > 1:
            there = [live for live in there if live.site.owner == running]
        return there[0] if len(there) == 1 else None

    def _is_weight(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        key, base = weight_key(value), value if value._base is None else value._base
        if key not in self._sites and self._sharded and isinstance(base, nn.Parameter):
            self._sites |= _by_weight(list(self._gathered()))
        return key in self._sites

    def _gathered(self) -> Iterator[LiveSite]:
        """The sites of the units that are gathered now, with the Parameter that their modules have meanwhile."""
        for live in self._sharded:
            weight = _weight(self._root, cast("str", live.site.weight))
            if weight is not None and not _is_sharded(weight.parameter):
                yield replace(live, weight=weight)


def _by_weight(sites: Sequence[LiveSite]) -> dict[WeightKey, list[LiveSite]]:
    found: dict[WeightKey, list[LiveSite]] = {}
    for site in sites:
        found.setdefault(site.key, []).append(site)
    return found


def _module_name(live: LiveSite) -> str:
    return live.site.name if live.site.kind is GemmKind.LINEAR else live.site.owner


def _tell(module: nn.Module, name: str, running: _Running) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks that record a module's name while its forward runs."""

    def entered(module: nn.Module, args: Any) -> None:
        running.names.append(name)

    def left(module: nn.Module, args: Any, out: Any) -> None:
        if name in running.names:
            del running.names[len(running.names) - 1 - running.names[::-1].index(name) :]

    return module.register_forward_pre_hook(entered), module.register_forward_hook(left, always_call=True)


def _place(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of user code, as in `Site.where`."""
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            return f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
