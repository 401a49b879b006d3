"""Packages of the studies' own small models.

Plans are for the current GPU; without one, or on another device than the targets, for the default target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.variants import Variant
from loka.bench.machine import device_here
from loka.bench.packages import Workshop
from loka.errors import LokaError
from loka.mods.registry import INTERACTION_MOD
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.probe.profile.profile import Profile
from loka.probe.profile.profile_file import save

SMALLEST = 64  # sites with K or N up to this stay native
POLICY = """\
version: 1
name: {name}
target: {target}
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
defaults: {defaults}
rules:
  - {{match: {{max_n: {smallest}}}, compute: keep, optional: true}}
  - {{match: {{max_k: {smallest}}}, compute: keep, optional: true}}
mods: [{{use: {interactions}, optional: true}}]
"""

Learn = Callable[[Path], Profile]  # policy file -> profile of its model


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to generate a package for. `source`: text of a module with `build()` and `inputs(batch_size)`.

    Inputs that need a gradient must have requires_grad set: the plan leaves out unneeded gradients.
    """

    name: str  # an identifier
    source: str
    batch: int


@dataclass(frozen=True, slots=True)
class BuiltPackage:
    """A generated and imported package, and its plan."""

    package: ModuleType
    plan: Plan


class StudyWorkshop(Workshop):
    """A Workshop that also makes the packages of subjects."""

    def add(self, subject: Subject) -> tuple[str, str]:
        """Make a subject importable; returns its factory and its inputs as "module:name"."""
        module = f"loka_bench_{subject.name}"
        self.write(f"{module}.py", subject.source)
        full = self.announce(module)
        return f"{full}:build", f"{full}:inputs"

    def make(self, subject: Subject, variant: Variant, learn: Learn | None = None) -> BuiltPackage:
        """Generate `variant`'s package for `subject`; `learn` returns the profile of a variant with static scales.

        Raises LokaError if such a variant has no `learn`, if the planner fails, if an FP8 variant gets no GEMM in FP8,
        and if nothing is replaced, since the unchanged model would be measured under another name.
        """
        factory, inputs = self.add(subject)
        name = f"loka_bench_{subject.name}_{variant.name.replace('-', '_')}"
        text = POLICY.format(
            name=name,
            target=device_here().name,
            factory=factory,
            inputs=inputs,
            batch=subject.batch,
            defaults=variant.defaults,
            smallest=SMALLEST,
            interactions=INTERACTION_MOD,
        )
        policy = self.write(f"{name}.yaml", text)
        if variant.known:
            if learn is None:
                raise LokaError(f"{variant.name} needs the maxima of its operands, and none were learned")
            save(policy.with_suffix(".safetensors"), learn(policy))
            self.write(policy.name, f"{text}profile: {name}.safetensors\n")
        plan = make_plan(policy)
        refuse_nothing(plan, variant.precision.is_fp8)
        return BuiltPackage(self.package(plan), plan)


def refuse_nothing(plan: Plan, fp8: bool) -> None:
    """Raise LokaError if the plan has nothing to measure (in FP8), so that the result would be that of another one."""
    if fp8 and not any(site.fp8 for site in plan.sites):
        reasons = dict.fromkeys(gemm.reason for site in plan.sites for gemm in site.gemms)
        raise LokaError(f"no GEMM can run in FP8: {'; '.join(reasons)}")
    if not plan.bindings:
        notes = dict.fromkeys(site.region_note for site in plan.sites if site.region_note)
        raise LokaError(f"nothing is replaced: {'; '.join(notes) or 'no site is planned'}")
