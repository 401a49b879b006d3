"""`loka.fp8`: probe, plan, generate and bind in one call, for a model that is held in a variable."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.evaluation import seeded
from loka.bench.quality.training_calls import TrainingCallError, backward, form_of, scalar
from loka.bench.quality.training_job import random_label_loss
from loka.codegen import render_package, write_package
from loka.devices.targets import REFERENCE, device_named, spec_of
from loka.dispatch.bind.apply import check_mode
from loka.dispatch.dispatch_errors import NoFp8Warning
from loka.dispatch.patch import Patch
from loka.errors import Code, InputError
from loka.gc import deferred_gc
from loka.model.callables import describe_error
from loka.model.example_inputs import random_state_kept
from loka.mods.policy_loader import load_policy
from loka.mods.registry import INTERACTION_MOD
from loka.plan.draft import DraftOptions, draft_policy, drafted_from, policy_name
from loka.plan.examine import Examined, examine
from loka.plan.planner import Planned, planned
from loka.plan.prospect import WORTH
from loka.plan.totals import total_time
from loka.policy.policy import Policy
from loka.probe.learn import finish
from loka.probe.probe import Probe
from loka.probe.profile import profile_file
from loka.probe.profile.profile import Profile
from loka.trial.live_model import LiveModel
from loka.trial.trial_report import report_of

ROWS = 512  # sampled of each call, as `loka probe` does
PACKAGE = "generated"  # the folder of the package in the private one
YOURS = "my_pkg"  # where the policy, as it is told, looks for the user's functions

Loss = Callable[[Any], Tensor]

_log = logging.getLogger("loka")
_numbers = count(1)


@torch.inference_mode(False)
def fp8(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    mode: str = "train",
    target: str | None = None,
) -> Patch:
    """Try LoKA out on a model: probe it, plan, generate a package that only this process has, and bind it in place.

        patch = loka.fp8(model, example_inputs, loss=lambda logits: F.binary_cross_entropy_with_logits(logits, clicks))
        patch.report  # what is gained, by the verdict of `loka plan`; also said to the logger "loka"
        patch.policy  # the policy that was planned, in YAML: where the way to production begins

    One call of a copy of the model on the example is the evidence; the model's gradients, buffers and random state stay
    as they are. Where a plan gains nothing, nothing is bound: the patch has no sites, and the report says why. The
    package is in a temporary folder, which is removed when the process ends: what is pickled of a bound model cannot be
    read elsewhere, and a checkpoint (`state_dict`) can.

    Args:
        model: The model, on its device, with its weights; neither compiled nor wrapped. A copy of it is planned.
        example_inputs: One batch, on the model's device: a tensor, a tuple or list of positional arguments, or a dict
            of keyword arguments (or the dict that a forward of one argument takes). Real rows, and as many as a
            training step has: the plan is for that batch size. 8 samples or more.
        loss: Called with exactly what the model returned for `example_inputs`, so it holds the targets of these rows;
            returns the scalar that is trained, with a gradient. None: gradients are those of labels drawn at random,
            which is no evidence for training. Not for mode "infer".
        mode: "train", or "infer": the weights are quantized once, and the forward alone is probed, in evaluation mode,
            and planned.
        target: The device that is planned for, as in a policy. None: the model's GPU if it is a target, otherwise
            "reference", which has no times and takes FP8 where it is safe.

    Raises:
        InputError: An argument is wrong, the model does not take the example, `loss` raises, or torch's default device
            or dtype is not its own (CPU, float32); the model is as it was.
        BindError: The model is bound already, or cannot be bound; it is as it was.

    Warns:
        LokaWarning: As `apply` does: for example, that FP8 is emulated on this device.
    """
    check_mode("loka.fp8", mode)
    if torch.get_default_device().type != "cpu" or torch.get_default_dtype() != torch.float32:
        raise InputError(
            f"torch's defaults are {torch.get_default_device()} and {torch.get_default_dtype()}, and loka.fp8 plans "
            'with its own: torch.set_default_device("cpu"), torch.set_default_dtype(torch.float32); set yours again '
            "after the call",
            Code.ARGUMENT,
        )
    if loss is not None and not callable(loss):
        raise InputError(
            f"loss has to be a function of what the model returns, not {type(loss).__name__}", Code.ARGUMENT
        )
    if loss is not None and mode == "infer":
        raise InputError("loss is for mode='train': with mode='infer' only the forward is probed", Code.ARGUMENT)
    live = LiveModel.of(model, example_inputs, frozen=mode == "infer")
    device = _target_of(live) if target is None else spec_of(target).name
    _log.warning(
        "loka.fp8: reading the forwards of %s: seconds for a small model, a minute or two for a wide one on a CPU",
        type(model).__name__,
    )
    _call(_in_its_mode(live), live, loss)  # a mistake is told before anything takes long
    folder = _private_folder()
    with live.importable() as home, deferred_gc(), random_state_kept():
        policy, text = _policy(live, home, device, folder)
        examined = examine(policy)
        if examined.sites:
            _log.warning("loka.fp8: probing %d GEMMs on the example", len(examined.sites))
            _save(_probed(live, examined, loss), policy)
        found = planned(policy, prospects=True, progress=partial(_log.warning, "loka.fp8: %s"))
    bound = _gains(found)
    if bound:
        write_package(render_package(found.plan), folder / PACKAGE, force=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patch: Patch = _imported(folder / PACKAGE, policy.name).apply(model, mode=mode)
    else:
        told = []
        patch = Patch(model, policy.name, ())
    patch.policy = text.replace(home, YOURS)
    patch.report = report_of(found, patch.policy, bound, mode, loss is not None, chosen=target is None)
    _log.warning("%s", patch.report)
    for each in told:
        if not issubclass(each.category, NoFp8Warning):  # the report says so
            warnings.warn(each.message, stacklevel=3)  # fp8, its decorator, its caller
    return patch


def _target_of(live: LiveModel) -> str:
    devices = {parameter.device for parameter in live.module.parameters() if parameter.device.type == "cuda"}
    known = [device_named(torch.cuda.get_device_name(device)) for device in devices]
    return next((device.name for device in known if device is not None), REFERENCE.name)


def _policy(live: LiveModel, home: str, target: str, folder: Path) -> tuple[Policy, str]:
    """The policy that `loka init` drafts, without the mods that it only proposes; and its text."""
    factory, inputs = f"{home}:build", f"{home}:example_inputs"
    drafted = drafted_from(factory, inputs, live.batch_size)
    name = policy_name("a:model", drafted.model_class or "model")
    options = DraftOptions(name, factory, inputs, live.batch_size, target=target)
    text = draft_policy(options, drafted.sites, [mod for mod in drafted.mods if mod.use == INTERACTION_MOD])
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return load_policy(path), text


def _probed(live: LiveModel, examined: Examined, loss: Loss | None) -> Profile:
    """The profile of one call of the model on its device: forward, and backward unless it is for inference."""
    model = _in_its_mode(live)
    with Probe(model, examined.policy, every=1, rows=ROWS) as probe:
        _call(model, live, loss)
        probe.step()
    recorded = probe.recorded()
    recorded = replace(recorded, profile=replace(recorded.profile, synthetic=not live.frozen and loss is None))
    return finish(recorded, examined.sites, examined.settings, batch_size=live.batch_size).profile


def _in_its_mode(live: LiveModel) -> nn.Module:
    return live.copy().train(not live.frozen)


def _call(model: nn.Module, live: LiveModel, loss: Loss | None) -> None:
    """Call a copy of the model, and compute gradients if it is for training. Raises InputError for a user's mistake."""
    args, kwargs = live.arguments()
    device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
    with seeded(0, device), torch.enable_grad():
        try:
            output = model(*args, **kwargs)
        except Exception as error:
            given = form_of(kwargs or args)
            raise InputError(
                f"example_inputs: the model, called with {given}, raised {describe_error(error)}", Code.INPUTS
            ) from error
        if live.frozen:
            return
        if loss is None:
            return backward(random_label_loss(output, torch.tensor(0)))
        try:
            backward(scalar(loss(output)))
        except TrainingCallError as error:
            raise InputError(f"loss: {error.args[0]}", Code.CALLABLE) from error
        except Exception as error:
            raise InputError(
                f"loss: called with {form_of(output)}, what the model returned, it raised {describe_error(error)}; one "
                "that takes targets, too, is given as loss=lambda output: my_loss(output, targets)",
                Code.CALLABLE,
            ) from error


def _save(profile: Profile, policy: Policy) -> None:
    """To where `planned` finds it."""
    path = policy.path.parent / policy.default_profile
    path.parent.mkdir()
    profile_file.save(path, profile)


def _gains(found: Planned) -> bool:
    """True if a plan has FP8, or is faster by what it fuses or merges."""
    total, prospect = total_time(found.plan), found.prospect
    exact = [each.without_us / each.us for each in prospect.exact if each.planned] if prospect is not None else []
    fused = [total.speedup] if total is not None else []
    return found.plan.share_fp8 > 0 or max([*fused, *exact], default=1.0) >= WORTH


def _imported(folder: Path, name: str) -> ModuleType:
    """Import a package from its folder, under a name that no other has."""
    full = f"{name}_fp8_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(full, folder / "__init__.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _private_folder() -> Path:
    """A new folder that other users cannot read, removed when this process ends."""
    folder, process = Path(tempfile.mkdtemp(prefix="loka-fp8-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not in a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
