"""A policy's model, made ready as each variant: adapted, converted, or bound to a generated package."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from loka.bench.device import BenchDevice
from loka.bench.model.model_variants import Casting, Compiling, ModelVariant, PackageKind, StepBlock, StepLaunch
from loka.bench.model.whole_step import StepSample, StepSettings, WholeStep, real_model, sample_of
from loka.bench.packages import KEEP_AND_FUSE, Workshop, policy_text
from loka.bench.peers import torchao_inference, torchao_training
from loka.dispatch import LokaWarning, Patch
from loka.errors import LokaError
from loka.kernels import call_counters
from loka.mods.adapt import adapt
from loka.mods.modded_model import built_model, model_without_mods
from loka.mods.policy_loader import load_policy
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.policy.policy import Policy


class ModelSubject:
    """A policy's model and its packages, each planned once. Use it within its Workshop.

    `plans` are those of packages beside the kinds, by the names that variants have for them. `synthetic`: the batch is
    the model's example inputs, whatever the policy says of training. Raises InputError if the model cannot be built.
    """

    def __init__(
        self, policy: Policy, workshop: Workshop, plans: Mapping[str, Plan] | None = None, synthetic: bool = False
    ) -> None:
        self.policy = policy
        self._workshop = workshop
        self._adaptations = built_model(policy)[1].adaptations
        self._built = model_without_mods(policy)
        self._base = real_model(policy, "cpu")
        self._samples: dict[bool, StepSample] = {}
        self._plans: dict[str, Plan] = dict(plans or {})
        self._synthetic = synthetic
        self._packages: dict[str, ModuleType] = {}

    @property
    def has_adaptations(self) -> bool:
        """True if the policy's mods change modules."""
        return bool(self._adaptations)

    def sample(self, training: bool) -> StepSample:
        """The batch of a mode. Raises the errors of `sample_of`."""
        if training not in self._samples:
            policy = replace(self.policy, train=None) if self._synthetic else self.policy
            self._samples[training] = sample_of(policy, self._built, training)
        return self._samples[training]

    def ready(self, variant: ModelVariant, block: StepBlock, device: BenchDevice) -> WholeStep:
        """A copy of the model as this variant, with its step. Errors of planners, libraries and compilers propagate."""
        sample = self.sample(block.training)
        bfloat16 = not variant.float32 and (block.casting is Casting.BFLOAT16 or _is_served_by_torchao(variant, block))
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        model = copy.deepcopy(self._base).to(device.type, dtype).train(block.training)
        model, patch = self._as_variant(model, variant, block)
        mode = variant.compile_mode(block.launch)
        called: Callable[..., Any] = model
        if variant.compiling in (Compiling.DEFAULT, Compiling.MAX_AUTOTUNE):
            called = device.compiled(model, mode)
        settings = StepSettings(
            training=block.training,
            dtype=dtype,
            autocast=not (bfloat16 or variant.float32),
            marks=block.launch is StepLaunch.REDUCE_OVERHEAD,
            device=device.type,
        )
        return WholeStep(called, model, sample, settings, patch)

    def write(self, variant: ModelVariant, block: StepBlock) -> None:
        """Generate the package of a variant, if it has one, before it is needed. Errors of planners propagate."""
        if variant.package is not None:
            self._package(variant.package, _own_name(variant, block))

    def _as_variant(self, model: nn.Module, variant: ModelVariant, block: StepBlock) -> tuple[nn.Module, Patch | None]:
        if variant.package is not None:
            package = self._package(variant.package, _own_name(variant, block))
            call_counters.leave_out(variant.counters)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LokaWarning)  # about the device and a new model: irrelevant here
                patch: Patch = package.apply(model, mode=block.mode)
            if variant.compiling is Compiling.FUNCTIONS:
                patch.compile(**_options(variant.compile_mode(block.launch)))
            return model, patch
        if variant.adapted:
            adapt(model, self._adaptations)
        if variant.torchao:
            convert = torchao_training if block.training else torchao_inference
            model = convert(model, variant.torchao)
        return model, None

    def _package(self, kind: str, own: str) -> ModuleType:
        """The package of a kind; `own` is the suffix of a copy that no other variant uses, "" for the common one."""
        name = f"bench_{self.policy.name}_{kind}{own}"
        if name not in self._packages:
            plan = self._plan(kind)
            if not plan.bindings:
                notes = dict.fromkeys(site.region_note for site in plan.sites if site.region_note)
                raise LokaError(f"the policy replaces nothing: {'; '.join(notes) or 'no site is planned'}")
            self._packages[name] = self._workshop.package(replace(plan, name=name))
        return self._packages[name]

    def _plan(self, kind: str) -> Plan:
        if kind not in self._plans:
            rules = [KEEP_AND_FUSE] if kind == PackageKind.BF16 else []
            name = f"bench_{self.policy.name}_{kind}"
            text = policy_text(self.policy, name, rules=rules, profiled=kind == PackageKind.POLICY)
            path = self._workshop.write(f"{name}.yaml", text)
            if kind == PackageKind.POLICY and self.policy.tuned_file.exists():
                self._workshop.copy(self.policy.tuned_file, load_policy(path).tuned_name)
            self._plans[kind] = make_plan(path)
        return self._plans[kind]


def _is_served_by_torchao(variant: ModelVariant, block: StepBlock) -> bool:
    """True for torchao's inference: its configuration is for models in bfloat16."""
    return bool(variant.torchao) and not block.training


def _own_name(variant: ModelVariant, block: StepBlock) -> str:
    """Suffix of a package whose functions are compiled by `Patch.compile`, which holds for all that use it."""
    if variant.compiling is not Compiling.FUNCTIONS:
        return ""
    return f"_functions_{block.label}".replace(" ", "_").replace("-", "_")


def _options(mode: str | None) -> Mapping[str, str]:
    return {} if mode is None else {"mode": mode}
