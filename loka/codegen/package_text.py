"""Rendering of a plan to the files of its package: formatted, stamped, and the same bytes on any machine."""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Collection
from pathlib import PurePath, PurePosixPath

from loka.codegen.chains.chain_functions import Chains
from loka.codegen.chains.interactions import InteractionCalls
from loka.codegen.layout import quoted
from loka.codegen.modules.binding_text import adaptation_text, binding_text
from loka.codegen.modules.forward_body import PackageKernels
from loka.codegen.modules.linear_recipes import Recipes
from loka.codegen.modules.module_classes import BoundView, ModuleWriter
from loka.codegen.modules.region_functions import Regions
from loka.codegen.modules.signature import outside_names
from loka.codegen.names import Names, shown
from loka.devices.spec import DeviceSpec
from loka.devices.targets import spec_of
from loka.errors import InputError
from loka.kernels.fused.rendering import KERNELS_FILE, render_all, render_files
from loka.plan.plan import Plan
from loka.plan.serialize import to_json
from loka.policy.communication import Wire
from loka.templating.templates import Templates, load_templates
from loka.templating.wrap import WIDTH
from loka.version import __version__

MANIFEST = "manifest.json"
PLAN = "plan.json"
_UNSTAMPED = "0" * 64


def render_package(plan: Plan, plan_json: str | None = None) -> dict[str, str]:
    """The package's files, by name, ending with manifest.json.

    `plan_json`: text of plan.json; None: the plan is serialised here. Raises InputError if the plan's name cannot name
    a package, LokaError if the plan contradicts itself.
    """
    if not plan.name.isidentifier() or not plan.name.isascii() or keyword.iskeyword(plan.name):
        raise InputError(
            f"a package cannot be called {plan.name!r}: give the policy a name that is a Python identifier"
        )
    templates = load_templates()
    text = to_json(plan) if plan_json is None else plan_json
    files = _render_code(plan, templates)
    inputs = _inputs(plan, text, templates, KERNELS_FILE in files)
    # Over inputs and outputs, so that two generations with one stamp have the same files.
    stamp = text_hash(json.dumps([inputs, files], sort_keys=True))
    stamped = {name: code.replace(_UNSTAMPED, stamp, 1) for name, code in files.items()}
    stamped[PLAN] = text
    stamped[MANIFEST] = _manifest(plan, stamp, inputs, stamped)
    return stamped


def _render_code(plan: Plan, templates: Templates) -> dict[str, str]:
    kernel_names = Names()
    arguments = outside_names(plan.bindings)
    kernels = PackageKernels(
        "fp8_kernels" if "kernels" in arguments else "kernels",
        Recipes(kernel_names),
        Regions(kernel_names),
        Chains(kernel_names),
        InteractionCalls(kernel_names),
    )
    writer = ModuleWriter({site.site.name: site for site in plan.sites}, plan.batch_size, kernels)
    views = [writer.bound(binding) for binding in plan.bindings]
    common = {"name": plan.name, "policy": shown(policy_name(plan)), "stamp": _UNSTAMPED, "target": quoted(plan.target)}
    fused = _fused_files(templates, kernels, common["policy"], spec_of(plan.target))
    files = {
        **fused,
        "kernels.py": _kernels(templates, kernels, common),
        "modules.py": _modules(templates, writer, views, common),
        "__init__.py": templates.render(
            "init.py.j2",
            {
                "bindings": [binding_text(view) for view in views],
                "adaptations": [adaptation_text(adaptation) for adaptation in plan.adaptations],
                "fused": bool(fused),
                "gathers": [(quoted(each.weight), each.wire) for each in plan.gathers if each.wire is not Wire.FP8],
                "exchange": plan.exchange,
                **common,
            },
        ),
    }
    return {name: _with_exemptions(code, arguments if name == "modules.py" else ()) for name, code in files.items()}


def _fused_files(templates: Templates, kernels: PackageKernels, policy: str, device: DeviceSpec) -> dict[str, str]:
    """The files of Triton kernels and their operators; none if no kernel is called."""
    specs = dict.fromkeys((*kernels.chains.specs(), *kernels.interactions.specs()))
    rendered = render_all(specs, device=device)
    return render_files(rendered, templates, policy, _UNSTAMPED) if rendered else {}


def _kernels(templates: Templates, kernels: PackageKernels, common: dict[str, str]) -> str:
    linears = kernels.recipes.linears()
    return templates.render(
        "kernels.py.j2",
        {
            "linears": linears,
            "quantizers": kernels.recipes.quantizers(),
            "requantize_transpose": kernels.recipes.requantize_transpose,
            "chains": kernels.chains.view(),
            "functions": kernels.interactions.views(),
            "regions": kernels.regions.views,
            "known": kernels.chains.known,
            "imports": sorted(kernels.regions.imports),
            **common,
        },
    )


def _modules(templates: Templates, writer: ModuleWriter, views: list[BoundView], common: dict[str, str]) -> str:
    classes = [view.module for view in views]
    typed = "\n".join([view.header for view in classes])
    return templates.render(
        "modules.py.j2",
        {
            "classes": classes,
            "kernels": writer.kernels.module,
            "uses_kernels": any(
                f"{writer.kernels.module}." in line for view in classes for line in (*view.body, view.quantized)
            ),
            "imports": sorted(writer.imports),
            "uses_any": "Any" in typed,
            "uses_tensor": "Tensor" in typed or any(view.quantized for view in classes),
            **common,
        },
    )


def _with_exemptions(code: str, arguments: Collection[str] = ()) -> str:
    """`code`, with a noqa line for findings that names of the model cause: long lines, arguments in upper case."""
    rules = []
    if any(len(line) > WIDTH and " " in line.strip() for line in code.split("\n")):
        rules.append("E501")
    if any(re.fullmatch("[lIO]", argument) for argument in arguments):
        rules.append("E741")
    if any(argument.lower() != argument for argument in arguments):
        rules.append("N803")
    return f"# ruff: noqa: {', '.join(rules)}\n{code}" if rules else code


def policy_name(plan: Plan) -> str:
    """The policy's file as the user named it; of an absolute path only the file name, so that machines agree."""
    file = plan.policy_files[0][0] if plan.policy_files else plan.name
    return _portable(file)


def _portable(file: str) -> str:
    path = PurePath(file)
    return path.name if path.is_absolute() else PurePosixPath(*path.parts).as_posix()


def _inputs(plan: Plan, plan_json: str, templates: Templates, has_kernels: bool) -> dict[str, str]:
    """Inputs of the package: name -> sha256."""
    inputs = {f"policy {_portable(file)}": digest for file, digest in plan.policy_files}
    if plan.profile is not None:
        inputs[f"profile {_portable(plan.profile[0])}"] = plan.profile[1]
    if plan.measurements is not None:
        inputs[f"measurements {_portable(plan.measurements[0])}"] = plan.measurements[1]
    if plan.tuned is not None:
        inputs[f"tuned {_portable(plan.tuned.file)}"] = plan.tuned.sha256
    inputs |= {f"template {name}": digest for name, digest in templates.hashes(kernels=has_kernels).items()}
    return {**inputs, PLAN: text_hash(plan_json), "loka": __version__}


def _manifest(plan: Plan, stamp: str, inputs: dict[str, str], files: dict[str, str]) -> str:
    manifest = {
        "format": "loka.package",
        "version": 1,
        "name": plan.name,
        "policy": policy_name(plan),
        "stamp": stamp,
        "inputs": inputs,
        "outputs": {name: text_hash(text) for name, text in files.items()},
    }
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def text_hash(text: str) -> str:
    """sha256 of a text as UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
