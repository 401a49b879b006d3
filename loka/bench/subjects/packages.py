"""Generated packages for benchmarks: a policy in a temporary folder is planned, rendered and imported as usual.

Plans are for the current GPU; without one, or on another device than the targets, for the default target.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from loka.bench.machine import device_here
from loka.bench.subjects.variants import Variant
from loka.codegen import render_package, write_package
from loka.errors import LokaError
from loka.kernels.fused.rendering import OPERATORS_FILE, AnySpec, render_all, render_files
from loka.mods.registry import INTERACTION_MOD
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.probe.profile.profile import Profile
from loka.probe.profile.profile_file import save
from loka.templating.templates import load_templates

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


class Workshop:
    """Context manager: a temporary folder that packages are generated into and imported from.

    With `folder`, that of another process' Workshop: its packages are imported as they are, and it stays.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="loka-bench-") if folder is None else None
        self._path = Path(self._folder.name) if self._folder is not None else Path(folder or "")
        self._imported: list[str] = []

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._path

    def __enter__(self) -> Self:
        sys.path.insert(0, str(self._path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.path.remove(str(self._path))
        for name in self._imported:
            _forget(name)
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, subject: Subject) -> tuple[str, str]:
        """Make a subject importable; returns its factory and its inputs as "module:name"."""
        module = f"loka_bench_{subject.name}"
        (self._path / f"{module}.py").write_text(subject.source, encoding="utf-8")
        self._announce(module)
        return f"{module}:build", f"{module}:inputs"

    def make(self, subject: Subject, variant: Variant, learn: Learn | None = None) -> BuiltPackage:
        """Generate `variant`'s package for `subject`; `learn` returns the profile of a variant with static scales.

        Raises LokaError if such a variant has no `learn`, if the planner fails, if an FP8 variant gets no GEMM in FP8,
        and if nothing is replaced, since the unchanged model would be measured under another name.
        """
        factory, inputs = self.add(subject)
        name = f"{factory.partition(':')[0]}_{variant.name.replace('-', '_')}"
        target = device_here().name
        settings = {"name": name, "target": target, "factory": factory, "inputs": inputs, "batch": subject.batch}
        policy = self._path / f"{name}.yaml"
        named = {"defaults": variant.defaults, "smallest": SMALLEST, "interactions": INTERACTION_MOD}
        text = POLICY.format(**settings, **named)
        policy.write_text(text, encoding="utf-8")
        if variant.known:
            if learn is None:
                raise LokaError(f"{variant.name} needs the maxima of its operands, and none were learned")
            save(policy.with_suffix(".safetensors"), learn(policy))
            policy.write_text(f"{text}profile: {name}.safetensors\n", encoding="utf-8")
        plan = make_plan(policy)
        if variant.precision.is_fp8 and not any(site.fp8 for site in plan.sites):
            reasons = dict.fromkeys(gemm.reason for site in plan.sites for gemm in site.gemms)
            raise LokaError(f"no GEMM can run in FP8: {'; '.join(reasons)}")
        if not plan.bindings:
            notes = dict.fromkeys(site.region_note for site in plan.sites)
            raise LokaError(f"nothing is replaced: {'; '.join(notes)}")
        write_package(render_package(plan), self._path / name)
        self._announce(name)
        return BuiltPackage(importlib.import_module(name), plan)

    def write(self, file: str, text: str) -> Path:
        """Write a file into the folder; returns its path."""
        path = self._path / file
        path.write_text(text, encoding="utf-8")
        return path

    def copy(self, file: Path, name: str) -> None:
        """Copy a file into the folder, under a path relative to it."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)

    def package(self, plan: Plan) -> ModuleType:
        """Generate and import the package of an existing plan; its name must be new in the folder, if that is ours."""
        if self._folder is not None:
            write_package(render_package(plan), self._path / plan.name)
        self._announce(plan.name)
        return importlib.import_module(plan.name)

    def kernels(self, specs: Sequence[AnySpec]) -> ModuleType:
        """The module of these specs' operators, as in a generated package."""
        templates = load_templates()
        name = "loka_bench_kernels"
        folder = self._path / name
        folder.mkdir()
        kernels = render_all(specs, templates, device=device_here())
        files = render_files(kernels, templates, "loka bench kernels")
        for file, text in {**files, "__init__.py": ""}.items():
            (folder / file).write_text(text, encoding="utf-8")
        self._announce(name)
        return importlib.import_module(f"{name}.{OPERATORS_FILE.removesuffix('.py')}")

    def _announce(self, name: str) -> None:
        """Note that a module of that name is now in the folder, and drop an earlier import of the name."""
        _forget(name)
        self._imported.append(name)
        importlib.invalidate_caches()


def _forget(name: str) -> None:
    for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[known]
