"""A package bound to a model: verification that its kernels ran, and removal."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from loka.dispatch.bind.bind_warnings import warn_without_fp8
from loka.dispatch.bind.bound import (
    Bound,
    derived_class,
    frozen,
    refresh,
    unbound_class,
)
from loka.dispatch.bind.check_model import BACK, ForwardCheck, shown
from loka.dispatch.bind.unplanned import few
from loka.dispatch.bind.wrappers import find_module, unwrap
from loka.dispatch.bound_state import BoundModule, KeptModule, bind, unbind
from loka.dispatch.dispatch_errors import BindError, LokaWarning, VerifyError
from loka.dispatch.frozen_since import ChangedGradients, changed_gradients
from loka.dispatch.keep_sites import chosen_modules
from loka.dispatch.nonfinite import NonFiniteTrace
from loka.dispatch.ranges import named_ranges
from loka.dispatch.shard.gather import Gathering, gather_fp8
from loka.dispatch.shard.ranks import Ranks, require_same
from loka.dispatch.static_scales import Overflow, clear_overflow_stats, give_back_to_ddp, names_in, overflows
from loka.dispatch.verification import changes_of, idle_reason, overflow_advice, uncalled_reason, unplanned_kernels
from loka.errors import Code
from loka.kernels import call_counters
from loka.mods.structure import plain_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GEMMS = ("fprop", "dgrad", "wgrad")  # in the order of their counter ids


class Patch:
    """A package bound to a model, as returned by `apply`. `sites`: names of the patched sites, in order.

    Of `loka.fp8`, `report` says in words what is gained, and `policy` has the policy that was planned, in YAML; both
    are "" from `apply`.
    """

    def __init__(self, root: nn.Module, package: str, modules: tuple[BoundModule, ...]) -> None:
        self._root = root
        self._package = package
        self.report = self.policy = ""
        self._modules = modules
        self._kept: tuple[KeptModule, ...] = ()
        # A bound class -> the module's own. Compiled code is for one class, so that each has to come back as it was.
        self._own_classes: dict[type, type] = {}
        self._order = {id(bound.module): number for number, bound in enumerate(modules)}
        self._all = tuple(site for bound in modules for site in bound.counters.sites)  # including those sent back
        self._since: dict[int, dict[str, int]] = {}  # counts at the last reset, by counter id and kernel
        self._removed = False
        self._entered = 0  # contexts of it that are open
        self._bound_classes: dict[int, type] = {}  # by the ids of modules that a trial may run by their own forwards

    @property
    def package(self) -> str:
        """The name of the generated package."""
        return self._package

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the bound sites; those of modules that lost their binding since are not there."""
        return tuple(site for bound in self._modules if bound.is_bound for site in bound.counters.sites)

    def verify(self, backward: bool = True) -> None:
        """Raise VerifyError unless each planned FP8 GEMM ran on its planned kernel since `apply` or the last `reset`.

        Also raises if a module's own forward is no longer the planned one: it is captured again as in `apply`.
        Children that a generated forward calls may change.
        `backward=False` checks only forward GEMMs. A GEMM counts when its kernel is launched: a CUDA graph counts when
        it is captured, not when it is replayed. Raises too if a frozen weight has changed since it was quantized; a
        weight that FSDP has split since `apply` is not compared. Warns (LokaWarning) about `overflows`, about
        Parameters that were frozen or thawed since planning, whose GEMMs of the backward are not asked for, and if the
        package has no FP8, so that there is nothing to verify. Synchronises with the GPU in mode "infer" and if there
        are static scales.
        """
        self._require_bound("verify")
        check = ForwardCheck(BACK)
        changes = [change for bound in self._modules for change in changes_of(self._root, bound, check)]
        idle: list[str] = []
        gradients = changed_gradients(self._package, self._modules) if backward else ChangedGradients()
        missing = total = excused = 0
        for bound in self._modules:
            for index, site in enumerate(bound.counters.sites):
                planned = bound.counters.planned(index)
                expected = tuple(gemm for gemm in planned if backward or gemm == "fprop")
                ran = {gemm: self._ran(bound.counters.counter_id(index), gemm) for gemm in expected}
                absent = tuple(gemm for gemm in expected if not ran[gemm])
                total += len(expected)
                if gradients.excuses(site, planned, absent):
                    excused += len(absent)
                elif absent:
                    missing += len(absent)
                    why = uncalled_reason(self._root, bound.name) if "fprop" in absent else None
                    idle.append(
                        f"{site}: {', '.join(absent)} did not run: {why or idle_reason(tuple(planned), absent)}"
                    )
                changes += unplanned_kernels(site, planned, ran)
        told = gradients.words(excused)
        if idle:
            problems = changes + told + idle
            raise VerifyError(
                f"{self._package}: {missing} of {total} planned FP8 GEMMs did not run:", Code.NOT_RUN, problems
            )
        if changes:
            raise VerifyError(f"{self._package}: the bound model is not as it was bound:", Code.CHANGED, changes)
        everything = (*self._modules, *(kept.bound for kept in self._kept))
        reported = bool(self.report)
        warn_without_fp8(self._package, (each.counters for each in everything), stacklevel=2, reported=reported)
        if told:
            warnings.warn(f"{self._package}: {'; '.join(told)}", LokaWarning, stacklevel=2)
        if over := self.overflows():
            warnings.warn(overflow_advice(self._package, over), LokaWarning, stacklevel=2)

    def overflows(self) -> tuple[Overflow, ...]:
        """Overflows of static scales (`range: static`) since `apply` or the last `reset`, by site and operand.

        The elements were saturated. They are counted on the device in every step, including replayed CUDA graphs;
        reading the counts waits for the device. () without static scales.
        """
        self._require_bound("ask for overflows")
        return tuple(
            found
            for bound, module in self._here()
            for found in overflows(module, module.loka_known, bound.counters.sites)
        )

    def reset(self) -> None:
        """Restart counting: `verify` and `overflows` then cover what runs from now on."""
        self._require_bound("reset")
        for _, module in self._here():
            clear_overflow_stats(module, module.loka_known)
        self._since = {number: call_counters.counts(number) for number, _ in self._labels()}

    def refresh(self) -> None:
        """Quantize frozen weights again, in place; no effect in mode "train".

        Calls after a change, and load_state_dict, do so by themselves. Needed after writes through `.data`, and before
        the replay of a CUDA graph that was captured by hand.

        Raises BindError if FSDP has split the weights since `apply`: load first, then apply, then shard.
        """
        self._require_bound("refresh")
        for _, module in self._here():
            refresh(module)

    def keep(self, *patterns: str) -> tuple[str, ...]:
        """Send sites back to the model's own forward, as `compute: keep` would, and return their names.

        A pattern is a site's name, or a glob whose `*` crosses dots: `patch.keep("layers.0.*", "head")`. Other sites
        are unchanged, and `verify` then covers only them. Sites that share a generated forward go back together.
        A compiled model recompiles; CUDA graphs must be captured again. `restore` undoes it.

        Raises BindError, with nothing changed, if a pattern matches no site of this patch, or if sites that do not
        match share a forward with one that does.
        """
        return self._send_back(self._chosen("keep", patterns, [bound for bound, _ in self._here()]))

    def restore(self, *patterns: str) -> tuple[str, ...]:
        """Run sites that `keep` sent back in FP8 again, and return their names.

        A pattern is as for `keep`. A compiled model runs what was compiled before `keep`, without compiling again; CUDA
        graphs must be captured again. Raises BindError, with nothing changed, as `keep` does, or if a module was
        replaced or bound by another patch since.
        """
        return self._bring_back(self._chosen("restore", patterns, [kept.bound for kept in self._kept]))

    def _send_back(self, chosen: Sequence[BoundModule]) -> tuple[str, ...]:
        """`keep` of modules."""
        self._require_bound("keep")
        self._require_own_forwards(chosen)
        kept = []
        for bound in chosen:
            bound_class = type(bound.module)
            kept.append(KeptModule(bound, bound_class, unbind(bound.module, self._own_class(bound_class))))
        self._kept += tuple(kept)
        self._modules = tuple(bound for bound in self._modules if bound not in chosen)
        return tuple(site for bound in chosen for site in bound.counters.sites)

    def _bring_back(self, chosen: Sequence[BoundModule]) -> tuple[str, ...]:
        """`restore` of modules."""
        self._require_bound("restore")
        back = [kept for kept in self._kept if kept.bound in chosen]
        if lost := [shown(kept.bound.name) for kept in back if not self._is_own(kept)]:
            raise BindError(
                f"{self._package}: cannot restore {', '.join(lost)}: replaced or bound anew since `keep`",
                Code.NOT_BOUND,
            )
        quantized = [frozen(kept.bound_class, kept.bound.module) for kept in back]
        for kept, weights in zip(back, quantized, strict=True):
            bind(kept.bound.module, kept.bound_class, kept.bound.counters, weights, kept.records)
        self._kept = tuple(kept for kept in self._kept if kept not in back)
        self._modules = self._in_order([*self._modules, *(kept.bound for kept in back)])
        return tuple(site for kept in back for site in kept.bound.counters.sites)

    @contextmanager
    def trial(self, fp8: bool | None) -> Iterator[tuple[BoundModule, ...]]:
        """Context in which all modules, those kept too, run in FP8, or all by their own forwards; yields them.

        None: each as it is. For comparisons of the two, eagerly; one may be inside another. What runs inside does not
        count for `verify`. Raises BindError if the patch was removed or is for mode "infer".
        """
        self._require_bound("compare")
        self._require_own_forwards(self._modules)
        kept = [each for each in self._kept if each.bound.is_bound or self._is_own(each)]
        here = self._in_order([*(each for each in self._modules if each.is_bound), *(each.bound for each in kept)])
        entered = [(bound.module, type(bound.module)) for bound in here]
        self._bound_classes |= {id(module): found for module, found in entered if issubclass(found, Bound)}
        if any(derived_class(found).loka_is_frozen for found in self._bound_classes.values()):
            raise BindError(
                f"{self._package}: bound with mode='infer', without gradients: apply with mode='train'", Code.FROZEN
            )
        before = {number: call_counters.counts(number) for number, _ in self._labels()}
        unbound = [each for each in kept if not each.bound.is_bound]
        try:
            for bound, (module, found) in zip(here, entered, strict=True):
                if fp8 is True and bound.is_bound:
                    module.__class__ = self._bound_classes[id(module)]
                elif fp8 is False and issubclass(found, Bound):
                    module.__class__ = self._own_class(found)
            for each in unbound if fp8 is True else ():
                bind(each.bound.module, each.bound_class, each.bound.counters, None, each.records)
            yield here
        finally:
            for each in unbound:
                unbind(each.bound.module, self._own_class(each.bound_class))
            for bound, (module, found) in zip(here, entered, strict=True):
                if bound.is_bound:  # unless the patch was removed inside
                    module.__class__ = found
            self._discount(before)

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
        for _, module in self._here():
            _compile_functions(derived_class(type(module)).loka_generated, options)

    def gather_fp8(self, model: nn.Module | None = None) -> Gathering:
        """Let FSDP2's all-gathers move weights in FP8: e4m3 values and a scale a row. Returns a report.

        After `apply` and `fully_shard`, in either order, and before the first forward, on every rank. It takes the
        weights of which the plan reads one FP8 copy alone (`power_of_two` and `requantize_transpose`, rowwise); other
        parameters are gathered as they are, as are those that the policy's `communication.weights` keeps from FP8, and
        the report says why. Results are those of quantizing the whole weight, to the bit. Optimizers, checkpoints and
        `state_dict` see the parameters as before. `model`: what fully_shard was called with, if that holds the bound
        model.

        Afterwards modules cannot run by their own forwards: `keep` and guards raise. Raises BindError if no parameter
        is sharded, FSDP has gathered one before, `reshard_after_forward` is a number, FSDP gathers in another
        dtype than the policy says, in mode "infer", or as `verify_ranks` does.
        """
        self._require_bound("gather in FP8")
        return gather_fp8(self._package, self._root, self._root if model is None else model, self._here())

    def verify_ranks(self, group: ProcessGroup | None = None) -> None:
        """Raise BindError on every rank unless all ranks of `group`, or all, have bound the same; collective.

        The same: one generation of the package, the mode, the sites that run in FP8. The error says which rank has
        what. Call it on every rank, after `apply`; `gather_fp8` does it among the ranks that gather together, and a
        guard does. No effect without torch.distributed.
        """
        self._require_bound("compare")
        require_same(self._package, self._here(), Ranks(group))

    def remove(self) -> None:
        """Give every module its own class and forward back; a second call does nothing.

        What another patch has bound since stays as it is.

        The mods' changes to the model stay: the result is the adapted model with its own kernels.

        Classes added since by wrappers such as FSDP2's fully_shard stay too.
        """
        for bound in self._modules:
            if bound.is_bound and not isinstance(bound.module, Bound):  # inside a trial
                bound.module.__class__ = self._bound_classes[id(bound.module)]
        for bound, module in self._here():
            give_back_to_ddp(self._root, names_in(bound.name, module.loka_known))
            unbind(module)
        self._removed = True

    @contextmanager
    def ranges(self) -> Iterator[None]:
        """Context in which a trace of torch.profiler names the bound modules.

            with torch.profiler.profile() as profiler, patch.ranges():
                step()

        A module's forward is `loka: layers.0.up (fprop FP8)`, with the names of its sites in FP8 if it has several, and
        `fprop as-is` if none; each generated function in its backward is `loka: layers.0.up (backward of ...)`. Results
        are the same to the bit. Compiled code runs as it is, without ranges: there the generated kernels carry their
        own names. What torch.compile sees for the first time inside is compiled once more outside, so enter after the
        first step. Without a profiler nothing is recorded.
        """
        self._require_bound("name ranges")
        with named_ranges(tuple(bound for bound, _ in self._here())):
            yield

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
        """A context that removes the patch at its end; contexts of one patch nest, and the outermost removes it."""
        self._require_bound("enter")
        self._entered += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.remove()

    def __repr__(self) -> str:
        if self._removed:
            return f"<Patch {self._package}: removed>"
        bound = sum(bound.is_bound for bound in self._modules)
        kept = sum(len(kept.bound.counters.sites) for kept in self._kept)
        lost = len(self._all) - len(self.sites) - kept
        parts = [f"{_counted(len(self.sites), 'site')} in {_counted(bound, 'module')}"]
        parts += [f"{count} {what}" for count, what in ((kept, "kept"), (lost, "lost since apply")) if count]
        return f"<Patch {self._package}: {', '.join(parts)}>"

    def _here(self) -> list[tuple[BoundModule, Bound]]:
        """The modules that are as this patch has bound them."""
        return [(each, each.module) for each in self._modules if each.is_bound and isinstance(each.module, Bound)]

    def _require_bound(self, verb: str) -> None:
        if self._removed:
            raise BindError(
                f"{self._package}: cannot {verb}: this patch was removed; apply the package again", Code.NOT_BOUND
            )

    def _require_own_forwards(self, modules: Iterable[BoundModule]) -> None:
        if gathered := [one.site for bound in modules for one in bound.counters.gathered]:
            raise BindError(
                f"{self._package}: {few(gathered)}: the weight is gathered in FP8 (gather_fp8), and the module's own "
                "forward, which `keep` and guards run, needs it in the model's dtype: leave gather_fp8 out",
                Code.GATHER,
            )

    def _chosen(self, verb: str, patterns: Sequence[str], modules: Sequence[BoundModule]) -> tuple[BoundModule, ...]:
        """The modules whose sites the patterns of `keep` or `restore` name."""
        sites = [bound.counters.sites for bound in modules]
        return tuple(modules[number] for number in chosen_modules(self._package, verb, patterns, sites, self._all))

    def _in_order(self, modules: Sequence[BoundModule]) -> tuple[BoundModule, ...]:
        return tuple(sorted(modules, key=lambda bound: self._order[id(bound.module)]))

    def _own_class(self, bound_class: type) -> type:
        """The class of a module without the generated forward; the same one each time."""
        return self._own_classes.setdefault(bound_class, unbound_class(bound_class))

    def _is_own(self, kept: KeptModule) -> bool:
        """True if a kept module is as `keep` left it, and in its place."""
        bound = kept.bound
        own = type(bound.module) is self._own_class(kept.bound_class)
        return own and find_module(self._root, bound.name) is bound.module

    def _discount(self, before: dict[int, dict[str, int]]) -> None:
        """Leave the runs since `before` out of what `verify` counts."""
        for number, counts in before.items():
            since = self._since.setdefault(number, {})
            for kernel, count in call_counters.counts(number).items():
                since[kernel] = since.get(kernel, 0) + count - counts.get(kernel, 0)

    def _labels(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Every counter id of the patch, with its site and GEMM."""
        for bound in (*self._modules, *(kept.bound for kept in self._kept)):
            for site, number in zip(bound.counters.sites, bound.counters.numbers, strict=True):
                for offset, gemm in enumerate(GEMMS):
                    yield number + offset, (site, gemm)

    def _ran(self, fprop: int, gemm: str) -> tuple[str, ...]:
        """The kernels on which a GEMM ran since the last reset."""
        number = fprop + GEMMS.index(gemm)
        before = self._since.get(number, {})
        return tuple(kernel for kernel, count in call_counters.counts(number).items() if count > before.get(kernel, 0))


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
        raise BindError("no module of this model is bound", Code.NOT_BOUND)
    homes = (derived_class(type(bound.module)).loka_generated.__module__ for bound in modules)
    return Patch(root, ", ".join(dict.fromkeys(home.rpartition(".")[0] for home in homes)), modules)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _compile_functions(generated: type[nn.Module], options: Mapping[str, Any]) -> None:
    """Put compiled functions in the place of those of `kernels` that a generated class's forward calls.

    Forwards look the functions up in their module at each call, so those of other models change too.
    """
    kernels = sys.modules[generated.__module__.rpartition(".")[0] + ".kernels"]
    for name in generated.forward.__code__.co_names:
        found = vars(kernels).get(name)
        if inspect.isfunction(found):
            setattr(kernels, name, torch.compile(inspect.unwrap(found), fullgraph=True, **options))
