"""Generated packages for benchmarks: a policy in a temporary folder is planned, rendered and imported as usual."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import yaml

from loka.bench.machine import device_here
from loka.codegen import render_package, write_package
from loka.kernels.fused.rendering import OPERATORS_FILE, AnySpec, render_all, render_files
from loka.plan.plan import Plan
from loka.policy.policy import Policy
from loka.policy.tree import plain
from loka.templating.templates import load_templates

KERNELS = "loka_bench_kernels"
KEEP_AND_FUSE: Mapping[str, Any] = {"match": "*", "compute": "keep", "fuse": "always", "optional": True}


class Workshop:
    """Context manager: a temporary folder that packages are generated into and imported from.

    The folder is a package itself, whose name no other Workshop has: Dynamo takes two modules of one name in a process
    for an error. With `folder`, that of another process' Workshop: its packages are imported as they are, and it stays.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._own = tempfile.TemporaryDirectory(prefix="loka_bench_")
            outer = Path(self._own.name)
            folder = outer / outer.name
            folder.mkdir()
        self.folder = folder

    def __enter__(self) -> Self:
        sys.path.insert(0, str(self.folder.parent))
        return self

    def __exit__(self, *exception: object) -> None:
        sys.path.remove(str(self.folder.parent))
        _forget(self.folder.name)
        if self._own is not None:
            self._own.cleanup()

    def write(self, file: str, text: str) -> Path:
        """Write a file into the folder; returns its path."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        return path

    def copy(self, file: Path, name: str) -> None:
        """Copy a file into the folder, under a path relative to it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)

    def package(self, plan: Plan) -> ModuleType:
        """Generate and import the package of a plan; its name must be new in the folder, if that is ours."""
        if self._own is not None:
            write_package(render_package(plan), self.folder / plan.name)
        return importlib.import_module(self.announce(plan.name))

    def kernels(self, specs: Iterable[AnySpec] = ()) -> ModuleType:
        """The module of these specs' operators, as in a package; in another process' folder, the one that is there."""
        if self._own is not None:
            templates = load_templates()
            (self.folder / KERNELS).mkdir()
            kernels = render_all(specs, device=device_here())
            files = render_files(kernels, templates, "loka bench kernels")
            for file, text in {**files, "__init__.py": ""}.items():
                self.write(f"{KERNELS}/{file}", text)
        return importlib.import_module(f"{self.announce(KERNELS)}.{OPERATORS_FILE.removesuffix('.py')}")

    def announce(self, name: str) -> str:
        """The full name of a module that is now in the folder; an earlier import of it is dropped."""
        full = f"{self.folder.name}.{name}"
        _forget(full)
        importlib.invalidate_caches()
        return full


def _forget(name: str) -> None:
    for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[known]


def policy_tree(policy: Policy) -> dict[str, Any]:
    """The policy with its bases merged in, as dicts and lists."""
    return cast("dict[str, Any]", plain(policy.tree))


def policy_text(
    policy: Policy,
    name: str,
    mods: Collection[str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    profiled: bool = True,
    units: Sequence[str] = (),
) -> str:
    """The policy as YAML under another name, with only `mods` (None: all), and with more `rules` after its own.

    `units` take the place of its own, if there are some.

    Files are named by absolute paths. Without `profiled` the profile is left out: it describes the model with all mods.
    With only some mods rules become optional: they may name sites that exist only with a mod.
    """
    tree = policy_tree(policy)
    tree.pop("extends", None)
    tree["name"] = name
    tree["model"] = {**tree["model"], "batch_size": policy.model.batch_size}
    own = tree.get("rules") or []
    if mods is not None:
        tree["mods"] = [entry for entry in tree.get("mods") or [] if entry["use"] in mods]
        own = [{**rule, "optional": True} for rule in own]
    tree["rules"] = [*own, *map(dict, rules)]
    if units:
        tree["units"] = list(units)
    files = {"profile": policy.profile_file if profiled else None, "measurements": policy.measurements_file}
    for field, file in files.items():
        tree.pop(field, None)
        if file is not None:
            tree[field] = str(file.resolve())
    return yaml.safe_dump(tree, sort_keys=False)
