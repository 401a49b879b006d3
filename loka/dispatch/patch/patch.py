"""A package bound to a model: verification that its kernels ran, and removal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from loka.dispatch.bind.bound import (
    Bound,
    CallCounters,
    derived_class,
    drop_frozen,
    frozen_names,
    is_frozen_class,
    quantize,
    same_kind,
    set_frozen,
    unbound_class,
)
from loka.dispatch.bind.check_model import changes_since, shown
from loka.dispatch.bind.split_weights import is_split
from loka.dispatch.bind.wrappers import find_module, unwrap
from loka.dispatch.dispatch_errors import BindError, LokaWarning, VerifyError
from loka.dispatch.patch.compile_functions import compile_functions
from loka.dispatch.patch.keep_sites import chosen_modules
from loka.dispatch.patch.nonfinite import NonFiniteTrace
from loka.dispatch.patch.uncalled import uncalled_reason
from loka.dispatch.static_scales import (
    Overflow,
    clear_overflow_stats,
    drop_static_scales,
    give_back_to_ddp,
    names_in,
    overflows,
)
from loka.kernels import call_counters
from loka.mods.unwrap import plain_name

GEMMS = ("fprop", "dgrad", "wgrad")  # in the order of their counter ids

_NO_FORWARD = (
    "the module's forward did not run: the model was not called, took another branch, ran as a copy, was compiled or "
    "captured into a CUDA graph before apply, was replayed since reset, or had no rows"
)
_NO_BACKWARD = "no backward reached it"


@dataclass(frozen=True, slots=True)
class BoundModule:
    """A module of a patch. `counters`: from its binding; they stay valid if another patch removes it."""

    name: str
    module: nn.Module
    counters: CallCounters


class Patch:
    """A package bound to a model, as returned by `apply`. `sites`: names of the patched sites, in order."""

    def __init__(self, root: nn.Module, package: str, modules: tuple[BoundModule, ...]) -> None:
        self._root = root
        self._package = package
        self._modules = modules
        self._all = tuple(site for bound in modules for site in bound.counters.sites)  # including those sent back
        self._since: dict[int, dict[str, int]] = {}  # counts at the last reset, by counter id and kernel
        self._removed = False

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the bound sites."""
        return () if self._removed else tuple(site for bound in self._modules for site in bound.counters.sites)

    def verify(self, backward: bool = True) -> None:
        """Raise VerifyError unless each planned FP8 GEMM ran on its planned kernel since `apply` or the last `reset`.

        Also raises if the model no longer matches its generated forwards: children, their order, types and constants,
        shapes of parameters. Children that a generated forward calls may change.
        `backward=False` checks only forward GEMMs. A GEMM counts when its kernel is launched: a CUDA graph counts when
        it is captured, not when it is replayed. Raises too if a frozen weight has changed since it was quantised; a
        weight that FSDP has split since `apply` is not compared. Warns (LokaWarning) about `overflows`. Synchronises
        with the GPU in mode "infer" and if there are static scales.
        """
        self._require_bound("verify")
        changes = [change for bound in self._modules for change in self._changes(bound)]
        idle: list[str] = []
        missing = total = 0
        for bound in self._modules:
            for index, site in enumerate(bound.counters.sites):
                planned = bound.counters.planned(index)
                expected = tuple(gemm for gemm in planned if backward or gemm == "fprop")
                ran = {gemm: self._ran(bound.counters.counter_id(index), gemm) for gemm in expected}
                absent = tuple(gemm for gemm in expected if not ran[gemm])
                total += len(expected)
                missing += len(absent)
                if absent:
                    why = uncalled_reason(self._root, bound.name) if "fprop" in absent else None
                    idle.append(f"{site}: {', '.join(absent)} did not run: {why or _why(tuple(planned), absent)}")
                changes += _strangers(site, planned, ran)
        if idle:
            raise VerifyError(f"{self._package}: {missing} of {total} planned FP8 GEMMs did not run:", changes + idle)
        if changes:
            raise VerifyError(f"{self._package}: the bound model is not as it was bound:", changes)
        if over := self.overflows():
            warnings.warn(_said(self._package, over), LokaWarning, stacklevel=2)

    def overflows(self) -> tuple[Overflow, ...]:
        """Overflows of static scales (`range: static`) since `apply` or the last `reset`, by site and operand.

        The elements were saturated. They are counted on the device in every step, including replayed CUDA graphs;
        reading the counts waits for the device. () without static scales.
        """
        self._require_bound("ask for overflows")
        return tuple(
            found
            for bound in self._modules
            if isinstance(bound.module, Bound)
            for found in overflows(bound.module, bound.module.loka_known, bound.counters.sites)
        )

    def reset(self) -> None:
        """Restart counting: `verify` and `overflows` then cover what runs from now on."""
        self._require_bound("reset")
        for bound in self._modules:
            if isinstance(bound.module, Bound):
                clear_overflow_stats(bound.module, bound.module.loka_known)
        self._since = {number: call_counters.counts(number) for number, _ in self._labels()}

    def refresh(self) -> None:
        """Quantise frozen weights again, in place; no effect in mode "train". load_state_dict does it automatically.

        Raises BindError if FSDP has split the weights since `apply`: load first, then apply, then shard.
        """
        self._require_bound("refresh")
        for bound in self._modules:
            if isinstance(bound.module, Bound):
                refresh_module(bound.module)

    def keep(self, *patterns: str) -> tuple[str, ...]:
        """Send sites back to the model's own forward, as `compute: keep` would, and return their names.

        A pattern is a site's name, or a glob whose `*` crosses dots: `patch.keep("layers.0.*", "head")`. Other sites
        are unchanged, and `verify` then covers only them. Sites that share a generated forward go back together.
        A compiled model recompiles; CUDA graphs must be captured again. To run these sites in FP8 again, `remove` the
        patch and apply the package again.

        Raises BindError, with nothing changed, if a pattern matches no site of this patch, or if sites that do not
        match share a forward with one that does.
        """
        self._require_bound("keep")
        sites = [bound.counters.sites for bound in self._modules]
        chosen = chosen_modules(self._package, patterns, sites, self._all)
        for number in chosen:
            unbind(self._modules[number].module)
        self._modules = tuple(bound for number, bound in enumerate(self._modules) if number not in chosen)
        return tuple(site for number in chosen for site in sites[number])

    def compile(self, **options: Any) -> None:
        """Compile the generated functions that the bound modules call, each by itself, at its first call.

        For models that are not under torch.compile: their own code stays eager, and the host launches a function's
        kernels as the compiler does. Layers that share a function are compiled once, and gradients come function by
        function, as DDP needs them to overlap. A torch.compile around the model takes the functions in as they are.
        `options` are torch.compile's: `mode`, `dynamic`, `backend`, `options`; a second call replaces the first. With
        `mode="reduce-overhead"` each function is replayed as a CUDA graph, and the loop has to call
        torch.compiler.cudagraph_mark_step_begin() at the start of each step.

        It holds for all models that are bound to this package in this process, before and after, and stays when the
        patch is removed. Nothing of it is kept on modules: copies, pickles and checkpoints do not change.
        """
        self._require_bound("compile")
        for bound in self._modules:
            compile_functions(derived_class(type(bound.module)).loka_generated, options)

    def remove(self) -> None:
        """Give every module its own class and forward back; a second call does nothing.

        The mods' changes to the model stay: the result is the adapted model with its own kernels.

        Classes added since by wrappers such as FSDP2's fully_shard stay too.
        """
        for bound in self._modules:
            if isinstance(bound.module, Bound):
                give_back_to_ddp(self._root, names_in(bound.name, bound.module.loka_known))
            unbind(bound.module)
        self._removed = True

    @contextmanager
    def trace_nonfinite(self) -> Iterator[None]:
        """Context that raises NonFiniteError at the first site whose GEMM reads or produces a NaN or an infinity.

        For debugging: each GEMM is checked on the host, forward and backward, which is slow and synchronises. Replayed
        CUDA graphs are not checked; run the model eagerly. Warns (LokaWarning) if no GEMM was seen.
        """
        self._require_bound("trace_nonfinite")
        with NonFiniteTrace(dict(self._labels())) as trace:
            yield
        if not trace.seen:
            warnings.warn("trace_nonfinite saw no FP8 GEMM of this patch", LokaWarning, stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self._removed else f"{len(self.sites)} sites in {len(self._modules)} modules"
        if not self._removed and len(self.sites) < len(self._all):
            state += f", {len(self._all) - len(self.sites)} kept"
        return f"<Patch {self._package}: {state}>"

    def _require_bound(self, verb: str) -> None:
        if self._removed:
            raise BindError(f"{self._package}: cannot {verb}: this patch was removed; apply the package again")

    def _labels(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Every counter id of the patch, with its site and GEMM."""
        for bound in self._modules:
            for site, number in zip(bound.counters.sites, bound.counters.numbers, strict=True):
                for offset, gemm in enumerate(GEMMS):
                    yield number + offset, (site, gemm)

    def _ran(self, fprop: int, gemm: str) -> tuple[str, ...]:
        """The kernels on which a GEMM ran since the last reset."""
        number = fprop + GEMMS.index(gemm)
        before = self._since.get(number, {})
        return tuple(kernel for kernel, count in call_counters.counts(number).items() if count > before.get(kernel, 0))

    def _changes(self, bound: BoundModule) -> Iterator[str]:
        """Changes to a bound module that invalidate its counts."""
        name, module = bound.name, bound.module
        if not isinstance(module, Bound) or "forward" in vars(module) or module.loka is not bound.counters:
            yield f"{shown(name)}: lost its generated forward since apply"
            return
        if find_module(self._root, name) is not module:
            yield f"{shown(name)}: was replaced in the model since apply"
        found = list(changes_since(module, bound.counters.inlined, bound.counters.binding))
        yield from (f"{shown(name)}: {problem}" for problem in found)
        # What is not there any more cannot be quantised to compare with it.
        if not found and (stale := stale_sites(module)):
            yield f"{', '.join(stale)}: the weight changed since it was frozen: call patch.refresh()"


def _said(package: str, over: tuple[Overflow, ...]) -> str:
    """Text of the warning about overflows of static scales, with advice."""
    head = f"{package}: {len(over)} operands had more than their static scales hold (range: static):"
    advice = (
        "run loka probe again and generate, give a larger amax, or use range: dynamic there; until then "
        "patch.keep(SITE, ...) sends sites back to the model's own GEMMs"
    )
    return "\n  ".join([head, *map(str, over), advice])


def _strangers(site: str, planned: dict[str, tuple[str, ...]], ran: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Messages about GEMMs that ran on unplanned kernels: the package was edited or belongs to another plan."""
    for gemm, kernels in ran.items():
        if others := [kernel for kernel in kernels if kernel not in planned[gemm]]:
            yield f"{site}: {gemm} ran on {', '.join(others)}, planned was {' or '.join(planned[gemm])}"


def _why(gemms: tuple[str, ...], absent: tuple[str, ...]) -> str:
    """The likely reason why the `absent` GEMMs of a site did not run."""
    if "fprop" in absent:
        return _NO_FORWARD
    if "fprop" not in gemms and absent == gemms:
        return f"{_NO_BACKWARD}, or {_NO_FORWARD}"
    if absent == ("wgrad",) and "dgrad" in gemms:
        return "the weight needed no gradient (requires_grad)"
    if absent == ("dgrad",) and "wgrad" in gemms:
        return "the input needed no gradient"
    return _NO_BACKWARD


def patch_of(model: nn.Module) -> Patch:
    """The patch of a bound model that came from deepcopy, pickle or torch.load.

    Raises BindError if no module of it is bound.
    """
    root = unwrap(model)
    modules = tuple(
        BoundModule(plain_name(name), module, module.loka)
        for name, module in root.named_modules()
        if isinstance(module, Bound)
    )
    if not modules:
        raise BindError("no module of this model is bound")
    package = derived_class(type(modules[0].module)).loka_generated.__module__.rpartition(".")[0]
    return Patch(root, package, modules)


def refresh_module(module: Bound) -> None:
    """Quantise one module's frozen weights again. Raises BindError if this process has only a part of them."""
    generated = derived_class(type(module)).loka_generated
    if is_frozen_class(generated):
        if is_split(module):
            raise BindError(
                f"{', '.join(module.loka.sites)}: FSDP has split the weights since apply, so that they "
                "cannot be quantised again, and the frozen ones stay as they are: load the weights, apply with "
                "mode='infer', then shard (fully_shard), in this order"
            )
        set_frozen(module, quantize(generated, module))


def stale_sites(module: Bound) -> tuple[str, ...]:
    """The sites of a module whose frozen weight no longer equals the quantised parameter.

    () if FSDP has split the parameters: to compare, all processes would have to gather them.
    """
    generated = derived_class(type(module)).loka_generated
    if not is_frozen_class(generated) or is_split(module):
        return ()
    stale = []
    for index, (site, pair) in enumerate(zip(module.loka.sites, quantize(generated, module), strict=True)):
        if pair is not None:
            kept = tuple(module._buffers[name] for name in frozen_names(index))
            if not all(_same_bits(now, then) for now, then in zip(pair, kept, strict=True)):
                stale.append(site)
    return tuple(stale)


def refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    """load_state_dict post hook that quantises frozen weights again."""
    if isinstance(module, Bound):
        refresh_module(module)


def unbind(module: nn.Module) -> None:
    """Restore a module's own class; no effect if it is not bound."""
    if not isinstance(module, Bound):
        return
    if "loka" in vars(module):
        drop_frozen(module)
        drop_static_scales(module, module.loka_known)
        del module.loka
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is refresh_after_load]:
        del hooks[key]
    module.__class__ = unbound_class(type(module))


def _same_bits(now: torch.Tensor, then: torch.Tensor | None) -> bool:
    if then is None or not same_kind(now, then):
        return False
    if now.device.type == "meta":
        return True
    return torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))
