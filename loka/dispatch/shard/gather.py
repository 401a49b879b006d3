"""FP8 all-gathers with FSDP2: hooks on the sharded weights of a bound model.

FSDP2 asks the local part of a sharded parameter for what to gather, and what to make of it (`fsdp_pre_all_gather`,
`fsdp_post_all_gather`). A part has whole rows, so that with a scale a row its FP8 values are those of the whole weight.
The parameters stay as they are to optimizers and checkpoints.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch.bind.bound import Bound, Gathered, derived_class
from loka.dispatch.bind.wrappers import find_module
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.dispatch_errors import BindError
from loka.dispatch.shard.gathered_weight import GatheredWeight
from loka.dispatch.shard.ranks import Ranks, require_same
from loka.errors import Code

Place = tuple[int, str]  # of a parameter: the id of the module that has it, and its name there

_SCALE_BYTES = 4  # of a row
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # "native" is any
LOST = (
    "its weight lost the hooks of gather_fp8, as it was moved, cast or assigned since: move and load the model before"
)
_COPIES = "its recipe reads more than one FP8 copy of the weight, or a scale of the whole weight"


@dataclass(frozen=True, slots=True)
class Gathering:
    """What `Patch.gather_fp8` has set up; `str` is a report.

    Bytes are those that a rank has after gathering every sharded parameter once, padding and scales counted.
    """

    sites: tuple[str, ...]  # whose weights are gathered in FP8
    kept: tuple[tuple[str, str], ...]  # other FP8 sites, each with the reason
    weight_bytes: int  # of the weights gathered in FP8
    weight_bytes_before: int  # of the same in the dtype that they have in the forward
    total_bytes: int  # of all sharded parameters
    total_bytes_before: int

    def __str__(self) -> str:
        lines = [
            f"FP8 all-gather: {len(self.sites)} of {len(self.sites) + len(self.kept)} FP8 weights",
            f"  their bytes: {_ratio(self.weight_bytes, self.weight_bytes_before)}",
            f"  of all sharded parameters: {_ratio(self.total_bytes, self.total_bytes_before)}",
        ]
        reasons: dict[str, list[str]] = {}
        for site, reason in self.kept:
            reasons.setdefault(reason, []).append(site)
        lines += [f"  gathered as they are: {', '.join(sites)}: {reason}" for reason, sites in reasons.items()]
        return "\n".join(lines)


def _ratio(now: int, before: int) -> str:
    return f"{now} instead of {before} ({now / max(before, 1):.3f})"


@dataclass(frozen=True, slots=True, eq=False)
class _Sharded:
    """A parameter of a unit, as FSDP2 keeps it."""

    fsdp_param: Any  # an FSDPParam
    group: Any  # its FSDPParamGroup

    @property
    def places(self) -> list[Place]:
        """Where modules have it: several places if it is tied."""
        info = self.fsdp_param._module_info
        others = zip(map(id, info.shared_modules), info.shared_param_names, strict=True)
        return [(id(info.module), info.param_name), *others]

    @property
    def dtype(self) -> torch.dtype:
        """Of the gathered parameter."""
        parameter: Tensor = self.fsdp_param.sharded_param
        dtype: torch.dtype | None = self.group.mp_policy.param_dtype
        return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        part: Tensor = self.fsdp_param.sharded_param._local_tensor
        return part

    @property
    def ranks(self) -> int:
        """The number of ranks that have a part each."""
        return int(getattr(self.group.mesh_info, "shard_mesh_size", 1))

    @property
    def rows(self) -> int:
        """Those of all ranks' parts, which are equally large."""
        return self.ranks * int(self.fsdp_param.padded_sharded_param_size[0])

    @property
    def nbytes(self) -> int:
        """Bytes of an all-gather in its dtype, padding included."""
        return self.ranks * int(self.fsdp_param.padded_sharded_param_size.numel()) * self.dtype.itemsize

    @property
    def is_resharded_to_some(self) -> bool:
        """True if `reshard_after_forward` is a number of ranks."""
        after = self.group.post_forward_mesh_info
        return after is not None and after is not self.group.mesh_info

    @property
    def problem(self) -> str | None:
        """The reason why hooks cannot gather it."""
        from torch.distributed.tensor import Replicate, Shard

        if getattr(self.fsdp_param, "is_dtensor", False):
            return "its parameter is a DTensor of other parallelism too"
        *outer, inner = self.fsdp_param.sharded_param.placements
        if inner != Shard(0) or any(each != Replicate() for each in outer):
            return "it is not split along its rows"
        if self.ranks == 1:
            return "one rank has all of it"
        if self.fsdp_param.offload_to_cpu:
            return "it is offloaded to the CPU, which FSDP's hooks do not support"
        return None


def gather_fp8(
    package: str, planned: nn.Module, root: nn.Module, bound: Sequence[tuple[BoundModule, Bound]]
) -> Gathering:
    """`Patch.gather_fp8` for the bound modules of a patch on `planned`; `root` holds them and all FSDP units."""
    parameters = list(_sharded(root))
    if not parameters:
        raise BindError(
            f"{package}: no parameter of this model is sharded: fully_shard first, then gather_fp8", Code.GATHER
        )
    groups = (group for each in parameters for group in each.group.mesh_info.mesh.get_all_groups())
    require_same(package, bound, Ranks(*dict.fromkeys(groups)))
    if any(each.counters.mode == "infer" for each, _ in bound):
        raise BindError(
            f"{package}: with mode='infer' every rank has the FP8 weights: there is nothing to gather", Code.GATHER
        )
    at = {place: each for each in parameters for place in each.places}
    others = _others(package, planned, bound, at)
    # A parameter that modules share is read under one name; by the others in children whose forwards are not called.
    read = {_place(module, path) for _, module in bound for _, path, _ in module.loka_gatherable}
    uncalled = {id(module.get_submodule(path)) for _, module in bound for path in module.loka.binding.inlined}
    sites: dict[str, tuple[Bound, _Sharded, str]] = {}
    kept: list[tuple[str, str]] = []
    for each, module in bound:
        gatherable = {index: (path, kernel) for index, path, kernel in module.loka_gatherable}
        for index, site in enumerate(each.counters.sites):
            if index not in gatherable:
                kept += [(site, _COPIES)] if "fprop" in each.counters.planned(index) else []
                continue
            path, kernel = gatherable[index]
            found = at.get(_place(module, path))
            if found is None:
                kept.append((site, "it is not sharded by fully_shard"))
            elif wire := others.get(id(found)):
                kept.append((site, f"the plan has it gathered so (carry: {wire})"))
            elif reason := _reason(package, site, found):
                kept.append((site, reason))
            elif any(place not in read and place[0] not in uncalled for place in found.places):
                kept.append((site, "it is tied to a parameter that is read in another way"))
            else:
                sites[site] = module, found, kernel
    units: dict[int, _Unit] = {}
    columns: dict[int, int] = {}
    for module, found, kernel in sites.values():
        if id(found) not in columns:
            unit = units.setdefault(id(found.group), _Unit(found.group))
            columns[id(found)] = _hook(found, unit, *_quantizer(module, kernel))
    for each, _ in bound:
        chosen = [(site, sites[site][1]) for site in each.counters.sites if site in sites]
        each.counters.gathered = tuple(Gathered(site, found.fsdp_param, found.local) for site, found in chosen)
    in_fp8 = [each for each in parameters if id(each) in columns]
    of_weights = sum(each.rows * (columns[id(each)] + _SCALE_BYTES) for each in in_fp8)
    of_weights_before, before = (sum(each.nbytes for each in some) for some in (in_fp8, parameters))
    return Gathering(
        tuple(sites), tuple(kept), of_weights, of_weights_before, before - of_weights_before + of_weights, before
    )


def _reason(package: str, site: str, found: _Sharded) -> str | None:
    """Why a weight is gathered as it is; None if it can be gathered in FP8. Raises BindError for what has a remedy."""
    if reason := found.problem:
        return reason
    if found.is_resharded_to_some:
        raise BindError(
            f"{package}: {site}: FSDP2 cannot gather FP8 with a number of ranks as reshard_after_forward: give "
            "fully_shard reshard_after_forward=True or False",
            Code.GATHER,
        )
    if hasattr(found.fsdp_param, "_unsharded_param"):
        raise BindError(
            f"{package}: {site}: FSDP has gathered the weight before, and keeps to that form: call gather_fp8 after "
            "fully_shard and before the first forward",
            Code.GATHER,
        )
    if found.fsdp_param.sharded_param.is_meta:
        raise BindError(
            f"{package}: {site}: the weight is on the meta device: give it values (to_empty), then gather_fp8",
            Code.GATHER,
        )
    return None


def _sharded(root: nn.Module) -> Iterator[_Sharded]:
    """The parameters of all FSDP2 units in a module."""
    seen: set[int] = set()
    for module in root.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        state = None if state_of is None else state_of()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield from (_Sharded(parameter, group) for parameter in group.fsdp_params)


def _others(
    package: str, planned: nn.Module, bound: Sequence[tuple[BoundModule, Bound]], at: Mapping[Place, _Sharded]
) -> dict[int, str]:
    """The parameters, by id, that the plan keeps from FP8, each with what `GATHERS` of their packages says.

    Raises BindError where FSDP gathers another dtype than that, and for a weight that the model does not have.
    """
    homes = {derived_class(type(module)).loka_generated.__module__.rpartition(".")[0] for _, module in bound}
    found: dict[int, str] = {}
    for name, wire in (item for home in sorted(homes) for item in getattr(sys.modules[home], "GATHERS", {}).items()):
        path, _, own = name.rpartition(".")
        holder = find_module(planned, path)
        if holder is None:
            raise BindError(
                f"{package}: the plan says what the all-gather of {name!r} carries, and this model has no {path!r}: "
                "call gather_fp8 of the patch of the whole model",
                Code.GATHER,
            )
        if sharded := at.get((id(holder), own)):
            found[id(sharded)] = wire
            if _HALVES.get(wire, sharded.dtype) != sharded.dtype:
                raise BindError(
                    f"{package}: {name}: the policy has it gathered in {wire}, and FSDP gathers {sharded.dtype}: give "
                    f"fully_shard mp_policy=MixedPrecisionPolicy(param_dtype={_HALVES[wire]}), or write carry: native",
                    Code.GATHER,
                )
    return found


def _place(module: nn.Module, path: str) -> Place:
    holder, _, name = path.rpartition(".")
    return id(module.get_submodule(holder)), name


def _quantizer(module: Bound, kernel: str) -> tuple[Callable[..., Sequence[Tensor]], bool]:
    """The package's kernel that makes FP8 values (R, columns), scales (R, 1) and more of rows (R, K).

    True with it if it takes a list of such matrices, and gives the three of each.
    """
    generated = derived_class(type(module)).loka_generated
    function = getattr(sys.modules[generated.__module__.rpartition(".")[0] + ".fused"], kernel)
    return function, kernel == "quantize_weights"


_Made = dict[int, tuple[Tensor, Tensor]]  # FP8 values and scales, by the number of a part


class _Unit:
    """The weights of one FSDP unit that are gathered in FP8: what this rank sends of each, made of all at once.

    A backward that follows sends what forward sent: the weights that forward read are those of its gradients, and
    optimizers step after it (they leave no trace in the version of a DTensor that could be asked).
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._parts: list[tuple[_Sharded, Callable[..., Sequence[Tensor]], bool]] = []
        self._sent: _Made = {}  # of this gather, what FSDP has not asked for yet
        self._forward: _Made = {}  # what the last forward sent
        self._state: tuple[object, ...] = ()  # of which these were made

    def add(self, part: _Sharded, quantize: Callable[..., Sequence[Tensor]], takes_several: bool) -> Callable[[], Any]:
        """A function that gives FP8 values and scales of this rank's rows, for the next gather of the unit."""
        number = len(self._parts)
        self._parts.append((part, quantize, takes_several))
        return lambda: self._next(number)

    def _next(self, number: int) -> tuple[Tensor, Tensor]:
        device = self._parts[number][0].local.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        state = (stream, *(id(part.local) for part, _, _ in self._parts))
        if number not in self._sent or state != self._state:
            self._sent = self._forward if self._in_backward() and state == self._state else {}
            self._forward, self._state = {}, state
            if number not in self._sent:
                self._sent = self._made()
                if self._group.post_forward_mesh_info is not None and not self._in_backward():
                    self._forward = dict(self._sent)
        return self._sent.pop(number)

    def _in_backward(self) -> bool:
        return bool(self._group._training_state.name == "PRE_BACKWARD")

    def _made(self) -> _Made:
        """Of all parts; of those that share a kernel for several weights, in one call."""
        made: _Made = {}
        together: dict[Callable[..., Sequence[Tensor]], dict[int, Tensor]] = {}
        for number, (part, quantize, takes_several) in enumerate(self._parts):
            local = part.local
            rows = (local if local.shape[0] else local.new_zeros((1, local.shape[1]))).to(part.dtype)
            if takes_several:
                together.setdefault(quantize, {})[number] = rows
            else:
                values, scale, *_ = quantize(rows)
                made[number] = values, scale
        for quantize, rows_of in together.items():
            results = quantize([*rows_of.values()])
            made |= dict(zip(rows_of, zip(results[::3], results[1::3], strict=True), strict=True))
        return made


def _hook(found: _Sharded, unit: _Unit, quantize: Callable[..., Sequence[Tensor]], takes_several: bool) -> int:
    """Set both hooks on the local part of a parameter; returns the number of columns of its FP8 values."""
    local: Any = found.local
    size = tuple(found.fsdp_param.sharded_param.shape)
    sent = unit.add(found, quantize, takes_several)

    # Of the hook's two signatures the one with the mesh alone: with the other FSDP wants all inputs as large as a part.
    def before(mesh: Any) -> tuple[tuple[Tensor, Tensor], None]:
        count, each = found.local.shape[0], -(-size[0] // mesh.size())
        values, scale = (_padded(part.view(torch.uint8), count, each) for part in sent())
        return (values, scale), None

    def after(
        gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if out is not None:  # it has views of `gathered`, whose memory FSDP has filled again
            return None
        values, scale = (each[: size[0]] for each in gathered)
        return GatheredWeight(values.view(torch.float8_e4m3fn), scale.view(torch.float32), size, dtype), ()

    before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]  # FSDP reads it in every gather
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after
    with torch.no_grad():
        rows = local.new_zeros((1, size[1]), dtype=found.dtype)
        return int(quantize([rows] if takes_several else rows)[0].shape[1])


def _padded(rows: Tensor, count: int, wanted: int) -> Tensor:
    """The first rows, and zeros behind, as many as each rank sends."""
    if count == wanted:
        return rows
    made = rows.new_zeros((wanted, rows.shape[1]))
    made[:count] = rows[:count]
    return made
