"""`loka.Guard`: a guard while training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from loka.dispatch.bind.bound import Bound
from loka.dispatch.bind.check_model import shown
from loka.dispatch.bind.wrappers import ClosedWrapperError, unwrap
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.dispatch_errors import BindError
from loka.dispatch.guard.nonfinite_layer import first_nonfinite
from loka.dispatch.guard.runs import Fp8Run, OwnRun, undisturbed
from loka.dispatch.guard.saved_state import OTHER_STATE, SavedModule, read_state
from loka.dispatch.guard.verdicts import Fault, Judge, Norms, Past, promises, read
from loka.dispatch.patch import Patch
from loka.dispatch.shard.ranks import Ranks
from loka.errors import Code, InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_log = logging.getLogger("loka")


Action = Literal["fell back", "returned", "not finite"]


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """One finding of a check. `str` of it is the line that is logged.

    Attributes:
        step: Calls of `Guard.step` before the one that found it.
        action: "fell back" or "returned", of a bound module; "not finite", of any layer: FP8 is not at fault, and
            nothing is changed.
        module: Qualified name, "" for the model itself; "the batch" or "the loss" where no layer made the value.
        sites: The patch's sites in the module.
        figure: What was compared: "output", "gradient of its input", "gradient of fmb.0.weight", ...
        value: Relative error; inf: not finite; nan: none.
        limit: Of the relative error; nan: none.
        reason: A sentence.
    """

    step: int
    action: Action
    module: str
    sites: tuple[str, ...]
    figure: str
    value: float
    limit: float
    reason: str

    def __str__(self) -> str:
        where = f"'{self.module}'" if self.module else "the model itself"
        sites = f" ({', '.join(self.sites)})" if self.sites and self.sites != (self.module,) else ""
        return f"guard: step {self.step}: {where}{sites} {self.action}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GuardReport:
    """The figures of one check, the largest over all ranks.

    Attributes:
        step: Calls of `Guard.step` before this one.
        loss: By the model's own GEMMs.
        loss_fp8: As the model trains at the moment.
        errors: For each bound module and each of its figures the norm of what FP8 changes over that of the model's own
            tensor; inf where FP8 alone is not finite.
    """

    step: int
    loss: float
    loss_fp8: float
    errors: Mapping[str, Mapping[str, float]]

    def figures(self) -> dict[str, float]:
        """Losses and errors under one name each: "guard/loss", "guard/loss_fp8", "guard/layers.0.up/output"."""
        errors = {
            f"guard/{module or 'the model itself'}/{figure}": error
            for module, each in self.errors.items()
            for figure, error in each.items()
        }
        return {"guard/loss": self.loss, "guard/loss_fp8": self.loss_fp8, **errors}


@dataclass(slots=True)
class _Guarded:
    """A bound module, and what the guard knows of it."""

    bound: BoundModule
    judge: Judge
    fallen: bool = False
    falls: int = 0
    good: int = 0  # checks within limits since it fell back

    @property
    def is_fallen(self) -> bool:
        """True if it runs by its own forward because of the guard; it may have been restored by hand."""
        return self.fallen and not isinstance(self.bound.module, Bound)


class Guard:
    """Compares FP8 with the model's own GEMMs while it trains, and sends modules back where they part too far.

        patch = ranker.apply(model)
        guard = loka.Guard(model, patch, loss=lambda model, batch: loss_fn(model(*batch[0]), batch[1]))
        for batch in batches:
            guard.step(batch)
            train_step(model, batch)  # as without a guard

    On one step in `every` the batch runs twice more, eagerly: by the model's own forwards, and with each bound module
    in FP8 on the same inputs and output gradients. So a difference is found at the module that makes it, in its output,
    in the gradient of its input and in those of its parameters. Training is not disturbed: parameters, gradients,
    buffers, random numbers and what `verify` counts stay bit for bit as they are. A third run, forward only, gives the
    loss as the model trains at the moment.

    A module falls back, as by `patch.keep`, if FP8 makes a value that is not finite; if a figure is over its limit in
    three checks in a row; or if its figures drift: the median of the last five is over the promise, and over four times
    what was usual before. While a figure is over its limit, the next steps are checked too, so that this does not take
    long. The limit is `margin` times the error that the plan promises for the module's GEMMs together, three times that
    for gradients of parameters, whose sums over samples may cancel, and at most margin / 6. The module's own forward is
    what the package was generated from, and was checked by `apply`: nothing is decided but which of the two runs, and
    torch.compile compiles each combination once. A fallen module is still checked, and returns after `return_after`
    good checks in a row; one that falls twice stays.

    A value that is not finite without FP8 too is reported with the layer that makes it, a kept one as well.

    Each finding is logged (logger "loka", level WARNING), is in `events`, and is returned by `step`. A loop that
    replays a CUDA graph of its own has to capture it again after a step that returns an event; with torch.compile
    nothing is to be done, but more than eight combinations are more than its `recompile_limit`.

    With DDP and FSDP2 all ranks have to make the guard and call `step` alike; they check the same steps, on batches of
    their own, and decide together. Call `step` between optimizer steps, not amid an accumulation under FSDP2.

    `state_dict` and `load_state_dict` let a resumed job go on where the last one was: save it with the optimizer's, and
    load it into a guard of the same package. It is plain data, and the same on all ranks.

    Args:
        model: The model that is trained, as the loop has it: compiled, in DDP, sharded.
        patch: What `apply` returned for it, in mode "train".
        loss: `loss(model, batch)` returns the scalar loss. Call the `model` that it is given: it is the one inside of
            torch.compile and DDP. It is called three times in a check, so nothing in it should count. Autocast may be
            in it or around `step`.
        every: One step in this number is checked; counted from 0, step i if i % every == every - 1.
        rows: Check the first rows of each tensor of the batch; None: all. A check takes memory for the outputs of all
            bound modules and their gradients.
        margin: Limit of a figure, in multiples of what the plan promises.
        return_after: Good checks in a row after which a fallen module returns; None: it stays.
        group: Ranks that check together; None: all.
        hooks: Run hooks on modules and parameters in a check too; needed where the loss or the model works by one, as
            by an output that a hook changes or keeps. False: a check runs torch's own alone, as those of FSDP2, so that
            a hook which counts or logs runs once a step.
        log: Called after each check with its step and a dict of figures, those of `GuardReport.figures` and how many
            modules run by their own forwards ("guard/fallen"): for TensorBoard and the like, as the Probe's `log`.

    Attributes:
        events: All findings of this guard so far.
        report: The figures of the last check; None before the first.

    Raises:
        InputError: An argument cannot be used.
        BindError: The patch is of another model, was removed, is for mode "infer", or is not the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        patch: Patch,
        *,
        loss: Callable[[nn.Module, Any], Tensor],
        every: int = 1000,
        rows: int | None = None,
        margin: float = 3.0,
        return_after: int | None = 20,
        group: ProcessGroup | None = None,
        hooks: bool = False,
        log: Callable[[int, dict[str, float]], object] | None = None,
    ) -> None:
        if not isinstance(patch, Patch):
            raise InputError(f"guard: patch must be what apply returned, not a {type(patch).__name__}")
        for name, value in (("every", every), ("rows", rows or 1), ("return_after", return_after or 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"guard: {name} must be a whole number of at least 1, not {value!r}")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 1 <= margin < math.inf:
            raise InputError(f"guard: margin must be a number of at least 1, not {margin!r}")
        if not callable(loss):
            raise InputError(f"guard: loss must be a function of a model and a batch, not a {type(loss).__name__}")
        if log is not None and not callable(log):
            raise InputError(f"guard: log must be callable, not a {type(log).__name__}")
        self._model = _inner(model)
        self._patch = patch
        self._loss = loss
        self._every = every
        self._rows = rows
        self._return_after = return_after
        self._ranks = Ranks(group)
        self._hooks = hooks
        self._log = log
        self._step = 0
        self._next = every - 1
        self.events: tuple[GuardEvent, ...] = ()
        self.report: GuardReport | None = None
        patch.verify_ranks(group)
        with patch.trial(fp8=False) as bound:
            _check_model(self._model, bound)
            promised = promises(patch.package, bound)
            judges = {each.name: Judge(promised[each.name], margin) for each in bound}
            self._guarded = {each.name: _Guarded(each, judges[each.name]) for each in bound}

    @property
    def fallen(self) -> tuple[str, ...]:
        """Names of the modules that run by their own forwards at the moment."""
        return tuple(name for name, each in self._guarded.items() if each.is_fallen)

    def step(self, batch: Any) -> tuple[GuardEvent, ...]:
        """Report a training step and its batch, before it; checks if it is due. Returns what was found.

        Raises InputError if the batch cannot be cut, or the loss is no scalar, BindError if the patch was removed, and
        what `loss` raises, with a note of how it was called.
        """
        step, self._step = self._step, self._step + 1
        if step < self._next:
            return ()
        events = self._check(step, batch)
        self._next = self._due()
        return events

    def state_dict(self) -> dict[str, Any]:
        """What the guard knows: steps, the modules that fell back, and past figures; not its `events`.

        Plain data: torch.save writes it, torch.load reads it with weights_only=True, and JSON holds it.
        """
        modules = [
            {
                "name": name,
                "sites": list(each.bound.counters.sites),
                "fallen": each.is_fallen,
                "falls": each.falls,
                "good": each.good,
                "judge": each.judge.state(),
            }
            for name, each in self._guarded.items()
        ]
        return {"package": self._patch.package, "step": self._step, "modules": modules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: what had fallen back falls back at once, and steps are counted on.

        Modules that the user keeps stay kept, and modules that the state does not know start without a past. With
        several ranks give all of them the same state. Raises InputError, with nothing changed, for the state of another
        package, one with sites that this patch does not have, and what is no state; BindError if the patch was removed.
        """
        step, saved = read_state(state, self._patch.package)
        for name, module in saved.items():
            sites = self._guarded[name].bound.counters.sites if name in self._guarded else ()
            if sites != module.sites:
                raise InputError(
                    f"guard: the state has {shown(name)} with {', '.join(module.sites) or 'no site'}, where this patch "
                    f"of {self._patch.package} has {', '.join(sites) or 'none'}: {OTHER_STATE}"
                )
        with self._patch.trial(None):
            self._step = step  # raises if it was removed
        for name, each in self._guarded.items():
            module = saved.get(name, SavedModule((), False, 0, 0, Past({}, False)))
            kept = not each.is_fallen and not isinstance(each.bound.module, Bound)  # by the user
            if module.fallen and isinstance(each.bound.module, Bound):
                self._patch._send_back((each.bound,))
            elif each.is_fallen and not module.fallen:
                self._patch._bring_back((each.bound,))
            each.fallen, each.falls, each.good = module.fallen and not kept, module.falls, module.good
            each.judge.go_on(module.past)
        self._next = self._due()

    def _due(self) -> int:
        """The next step that is checked."""
        in_doubt = any(each.judge.in_doubt for each in self._guarded.values() if not each.fallen)
        return self._step if in_doubt else self._step + (self._every - 1 - self._step) % self._every

    def _check(self, step: int, batch: Any) -> tuple[GuardEvent, ...]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError("guard: step was called while a CUDA graph is captured: call it outside of the graph")
        if torch.is_inference_mode_enabled():
            raise InputError("guard: step was called in torch.inference_mode(), which has no gradients")
        batch = batch if self._rows is None else first_rows(batch, self._rows)
        norms, loss, loss_fp8 = self._compare(batch)
        found = []
        for name, each in self._guarded.items():
            if name in norms and (event := self._decide(step, each, each.judge.judge(norms[name]))) is not None:
                found.append(event)
        errors = {name: self._guarded[name].judge.errors for name in norms}
        self.report = GuardReport(step, loss, loss_fp8, errors)
        if not found and (event := self._of_no_module(self.report, batch, norms)) is not None:
            found.append(event)
        for event in found:
            _log.warning("%s", event)
        self.events += tuple(found)
        if self._log is not None:
            self._log(step, {**self.report.figures(), "guard/fallen": float(len(self.fallen))})
        return tuple(found)

    def _compare(self, batch: Any) -> tuple[dict[str, dict[str, Norms]], float, float]:
        """Norms of each module that ran, and the loss without and with FP8; the same on all ranks."""
        with undisturbed(self._model, self._hooks), self._patch.trial(fp8=False) as bound:
            own = OwnRun(bound)
            with own.watching():
                loss = self._loss_of(batch)
                if not any(run.calls for run in own.modules.values()) and self._guarded:
                    raise InputError("guard: loss ran none of the bound modules: call the model that it is given")
                own.backward(loss)
        with undisturbed(self._model, self._hooks), self._patch.trial(fp8=True) as bound:
            run = Fp8Run(bound, own)
            with run.watching():
                run.backward(self._loss_of(batch))
        with undisturbed(self._model, self._hooks), self._patch.trial(None), torch.no_grad():
            loss_fp8 = self._loss(self._model, batch)
        norms = read({name: each.figures for name, each in run.modules.items() if each.calls})
        flat = [value for each in norms.values() for pair in each.values() for value in (pair.apart, pair.own)]
        losses = [loss.item(), loss_fp8.item()]
        agreed = iter(self._ranks.largest([*losses, *flat]))
        losses = [next(agreed), next(agreed)]
        same = {name: {label: Norms(next(agreed), next(agreed)) for label in each} for name, each in norms.items()}
        return same, losses[0], losses[1]

    def _loss_of(self, batch: Any) -> Tensor:
        try:
            loss = self._loss(self._model, batch)
        except Exception as error:
            error.add_note(
                "guard: `loss` was called as loss(model, batch), with what `step` was given: call the model in it"
            )
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            what += " without gradients" if isinstance(loss, Tensor) and not loss.requires_grad else ""
            raise InputError(f"guard: loss(model, batch) must return a scalar tensor with a gradient, not {what}")
        return loss

    def _decide(self, step: int, each: _Guarded, fault: Fault | None) -> GuardEvent | None:
        """Send a module back or let it return."""
        bound = each.bound
        each.fallen = each.is_fallen
        if each.fallen:
            each.good = 0 if fault is not None or each.judge.in_doubt else each.good + 1
            if self._return_after is None or each.falls > 1 or each.good < self._return_after:
                return None
            self._patch._bring_back((bound,))
            each.fallen = False
            each.judge.forget()
            reason = f"{each.good} checks in a row within its limits"
            return GuardEvent(step, "returned", bound.name, bound.counters.sites, "", math.nan, math.nan, reason)
        if fault is None or not isinstance(bound.module, Bound):  # sent back by the user
            return None
        self._patch._send_back((bound,))
        each.fallen, each.good, each.falls = True, 0, each.falls + 1
        each.judge.forget()
        reason = fault.reason
        if self._return_after is not None:
            reason += "; it stays" if each.falls > 1 else f"; it returns after {self._return_after} good checks"
        sites, figure = bound.counters.sites, fault.figure
        return GuardEvent(step, "fell back", bound.name, sites, figure, fault.value, fault.limit, reason)

    def _of_no_module(
        self, report: GuardReport, batch: Any, norms: Mapping[str, Mapping[str, Norms]]
    ) -> GuardEvent | None:
        """A value that is not finite, if no bound module is at fault for it."""
        own = [pair.own for each in norms.values() for pair in each.values()]
        without = all(map(math.isfinite, [report.loss, *own]))
        if without and math.isfinite(report.loss_fp8):
            return None
        with undisturbed(self._model, self._hooks), self._patch.trial(None if without else False) as bound:
            found = first_nonfinite(self._model, bound, self._loss, batch, tensors_in(batch))
        name, what = self._ranks.first(found) or ("the loss", "the output of each layer is finite")
        how = "only with FP8 before it" if without else "without FP8 too"
        reason = f"the first value that is not finite is made here, {how}: {what}"
        return GuardEvent(report.step, "not finite", name, (), what, math.inf, math.nan, reason)


def _inner(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(f"guard: model must be the nn.Module that is trained, not a {type(model).__name__}")
    try:
        return unwrap(model)
    except ClosedWrapperError as error:
        raise BindError(
            f"guard: the model is wrapped in {error}, whose modules cannot run by themselves", Code.WRAPPED
        ) from None


def _check_model(model: nn.Module, bound: tuple[BoundModule, ...]) -> None:
    inside = set(map(id, model.modules()))
    if missing := [each.name for each in bound if id(each.module) not in inside]:
        raise BindError(
            f"guard: the patch is of another model than the one given, which lacks its {missing[0]!r}: give the guard "
            "the model that apply was given",
            Code.OTHER_MODEL,
        )


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of each tensor of a batch; tensors without dimensions stay.

    Raises InputError if the first dimensions of its tensors differ: which are samples cannot be known.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = f"have {', '.join(map(str, sorted(sizes)))} rows" if sizes else "are none"
        raise InputError(
            f"guard: rows={rows} takes the first rows of all tensors of the batch, which {found}: leave `rows` out, "
            "and cut the batch in `loss`, or give `step` tuples, lists or dicts of tensors with a row for each sample"
        )
    return tree_map(lambda leaf: leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
