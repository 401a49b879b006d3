"""Drafts a first policy for a model: short, broad, and safe to start from.

The draft is planned before it is written, so that its comments say what `loka plan` then prints.
"""

from __future__ import annotations

import json
import keyword
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import PydanticCustomError

from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.gc import deferred_gc
from loka.graph.sites.discover import SiteMap, sites_in
from loka.graph.sites.forwards import Forwards, forwards_of
from loka.graph.sites.site import GemmKind, Site
from loka.model.build_model import BuiltModel, build_model
from loka.model.callables import current_directory_importable
from loka.mods.dataflow import analyse_dataflow
from loka.mods.modded_model import selected_for_all
from loka.mods.protocols import UnplannedModel
from loka.mods.registry import INTERACTION_MOD, ModKind, forward_mod, module_mod, names_of
from loka.numerics.enums import Compute
from loka.plan.format import format_share
from loka.plan.mod_words import describe_adaptations, describe_changes
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.policy.checks import package_name
from loka.policy.policy import RECOMMENDED_EXECUTION

HEAD = 16  # output features up to which a GEMM is kept: a head's few outputs cost little and carry the prediction
NARROW = 16  # input features up to which a GEMM is kept
_VERBS = frozenset({"build", "make", "create", "get", "new", "load", "init", "construct", "factory", "main"})
_MODELS = frozenset({"model", "module", "net", "network", "nn", "the", "a", "my"})  # words that name no model
_EXECUTION = "how it is trained: loka tune measures steps so; or compiled, eager, graph"
_COMPUTE = "auto: FP8 where the evidence allows it; fp8: wherever it can run; keep: as the model has it"
LARGEST = 5  # sites in the comment
MANY = 1000  # sites beyond which a draft is not planned: thousands of layers take a minute


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Arguments of `loka init`. Callables are "package.module:name"."""

    name: str
    factory: str
    inputs: str | None
    batch_size: int
    batches: str | None = None
    loss: str | None = None
    target: str = DEFAULT.name


@dataclass(frozen=True, slots=True)
class Proposal:
    """One mod that would change something, with default parameters."""

    use: str
    what: str  # "14 biases dropped"
    exact: bool  # the function stays the same, up to rounding


@dataclass(frozen=True, slots=True)
class Drafted:
    """Contents of a first policy."""

    sites: tuple[Site, ...]
    mods: tuple[Proposal, ...]
    model_class: str = ""  # of the model, "" for a class of torch's own
    could: float | None = None  # share of the training GEMM FLOPs that could run in FP8; None if not planned


def drafted_from(factory: str, inputs: str | None, batch_size: int, batches: str | None = None) -> Drafted:
    """The sites of a model without a policy, and the mods that could change it.

    Raises InputError as `build_model` and `find_sites` do.
    """
    with deferred_gc(), current_directory_importable():
        built = build_model(factory, inputs, batch_size, batches=batches)
        forwards = forwards_of(built)
        found = sites_in(built, forwards)
        own = type(built.module)
        name = "" if own.__module__.partition(".")[0] == "torch" else own.__name__
        return Drafted(found.sites, tuple(_proposals(built, found, forwards)), name)


def _proposals(built: BuiltModel, found: SiteMap, forwards: Forwards) -> Iterator[Proposal]:
    """Proposed mods, those that keep the function first. Nothing is traced: `checked` plans them."""
    model = UnplannedModel(built.module, found.sites, found.siblings)
    for kind in (ModKind.INTERACTIONS, ModKind.SITES, ModKind.OWNERS):
        for name in names_of(kind):
            mod = forward_mod(name)
            what = mod.proposal(model)
            if what is not None:
                yield Proposal(name, what, mod.exact)
    dataflow = analyse_dataflow(built, forwards)
    for name in names_of(ModKind.MODULES):
        change = module_mod(name)
        adaptations = change.find(dataflow, selected_for_all(name)).adaptations
        if adaptations and not change.opt_in:
            yield Proposal(name, ", ".join(describe_adaptations(adaptations)), change.exact)


def checked(options: DraftOptions, drafted: Drafted) -> Drafted:
    """The contents of a first policy with the results of planning it.

    Mods that keep the function are planned together, as they are if the comments become mods: those that change nothing
    are left out, and the others say what they changed. `could` is the share of FLOPs that `compute: fp8` would take. If
    the model cannot be planned, proposals that nothing confirmed are left out, and `could` stays None. A model of more
    than MANY sites is not planned: its proposals stay as they were found.
    """
    if len(drafted.sites) > MANY:
        return drafted
    exact = [mod for mod in drafted.mods if mod.exact]
    plan = _planned(options, drafted, exact, Compute.AUTO) if exact else None
    changed = {mod.use: mod for mod in plan.mods if mod.rewritten} if plan is not None else {}
    kept = [replace(mod, what=describe_changes(changed[mod.use])) for mod in exact if mod.use in changed]
    forced = _planned(options, drafted, (), Compute.FP8)
    could = None if forced is None else forced.share_fp8
    return replace(drafted, mods=(*kept, *(mod for mod in drafted.mods if not mod.exact)), could=could)


def _planned(options: DraftOptions, drafted: Drafted, mods: Sequence[Proposal], compute: Compute) -> Plan | None:
    with tempfile.TemporaryDirectory(prefix="loka-init-") as folder:
        path = Path(folder) / "draft.yaml"
        path.write_text(draft_policy(options, drafted.sites, mods, compute=compute, active=True), encoding="utf-8")
        try:
            return make_plan(path)
        except InputError:  # `loka plan` will say what is wrong
            return None


def draft_policy(
    options: DraftOptions,
    sites: Sequence[Site],
    mods: Sequence[Proposal] = (),
    *,
    could: float | None = None,
    compute: Compute = Compute.AUTO,
    active: bool = False,
) -> str:
    """Text of a policy in which every rule matches at least one of the sites.

    Interactions are fused where that is faster. Other mods are included as comments, as a user has to decide about
    those that make a different model, unless they are `active`. `could` is the share of the training GEMM FLOPs that
    `compute: fp8` would take, if known.
    """
    model = [f"factory: {_quoted(options.factory)}"]
    if options.inputs is not None:
        model.append(f"inputs: {_quoted(options.inputs)}")
    model.append(f"batch_size: {options.batch_size}")
    lines = [
        "# yaml-language-server: $schema=schema.json",
        *_overview(sites, could),
        "version: 1",
        f"name: {options.name}",
        f"model: {{{', '.join(model)}}}",
        *_train(options),
        f"target: {options.target}",
        f"execution: {{mode: {RECOMMENDED_EXECUTION.value}}} # {_EXECUTION}",
        "",
        "defaults:",
        f"  compute: {compute.value} # {_COMPUTE}",
        "  scaling: auto # the fastest recipe within the budget, for each chain of layers",
        "  accumulation: auto # fast where that is measured to be faster and as accurate",
    ]
    rules = _rules(sites)
    if rules:
        lines += ["", "rules: # in order, later wins field by field", *rules]
    lines += _active(mods) if active else _mods(mods)
    return "\n".join(lines) + "\n"


def _train(options: DraftOptions) -> list[str]:
    """The training functions, or a comment that asks for them."""
    if options.batches is not None and options.loss is not None:
        return [
            "# loka train and compare also need `test`: batches that training does not see; and of a model with",
            "# several heads `heads`: those to judge, by their names in output and target: [click, buy].",
            f"train: {{batches: {_quoted(options.batches)}, loss: {_quoted(options.loss)}}}",
        ]
    return [
        "# For loka probe, train and compare, functions of (batch_size, seed) and of (output, target):",
        '# train: {batches: "package.module:name", test: "package.module:name", loss: "package.module:name"}',
    ]


def identifier(text: str) -> str:
    """A policy's name from the name of a file or function: letters, digits and _, no keyword, never empty."""
    made = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:60] or "model"
    if made[0].isdigit() or keyword.iskeyword(made):
        made = f"model_{made}"
    return made


def policy_name(factory: str, model_class: str) -> str:
    """A policy's name from a factory, "package.module:name": its own without a verb, or the class, or the module.

    `my_pkg.ranker:build` returns a TwoTower: "two_tower"; `zoo:build_wukong`: "wukong"; `zoo:dcnv2`: "dcnv2".
    """
    module, _, path = factory.partition(":")
    function = path.rpartition(".")[2]
    words = [word for word in _snake(function).split("_") if word]
    said = [word for word in words if word not in _VERBS]
    if set(said) - _MODELS:
        return identifier("_".join(said))
    return identifier(_snake(model_class) or _snake(module.rpartition(".")[2]))


def _snake(name: str) -> str:
    name = name.replace("MoE", "MOE")  # one word, as in MMoE
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def check_name(name: str) -> None:
    """Raise InputError for a name that a policy cannot have."""
    try:
        package_name(name)
    except PydanticCustomError as error:
        raise InputError(f"--name: {error.message()}") from error


def _overview(sites: Sequence[Site], could: float | None) -> list[str]:
    """Comments with the number of sites, what of them could run in FP8, and where the FLOPs are."""
    sites = [site for site in sites if site.called]
    count = f"{len(sites)} GEMM site{'s' if len(sites) != 1 else ''}"
    if could is None:
        lines = [f"# {count}. The largest by FLOPs:"]
    else:
        lines = [
            f"# {count}. With compute: fp8, {format_share(could)} of the training GEMM FLOPs would run in FP8;",
            "# with auto, what evidence (loka probe) allows and measurements say is faster. The largest by FLOPs:",
        ]
    largest = sorted(sites, key=lambda site: -site.share)[:LARGEST]  # stable: model order where shares are equal
    for site in largest:
        blocked = " (cannot be patched)" if site.blocked else ""
        lines.append(f"#   {_one_line(site.name)}: K {site.k}, N {site.n}, {format_share(site.share)}{blocked}")
    return lines if sites else ["# The model has no GEMM that LoKA can see."]


def _mods(mods: Sequence[Proposal]) -> list[str]:
    """Mods that take effect only where they are faster, and comments that become mods when the # is removed."""
    if not mods:
        return []
    chosen = [mod for mod in mods if mod.use == INTERACTION_MOD]
    others = [mod for mod in mods if mod not in chosen]
    lines = [""]
    if chosen:
        lines += ["mods:", *(f"  - {_entry(mod)} # {mod.what}; the same function" for mod in chosen)]
    if others:
        lines.append("# Changes to the model that make more of it safe and fast; each says what it would change.")
        lines += [] if chosen else ["# mods:"]
    for mod in others:
        kind = "the same function" if mod.exact else "another model, to be trained"
        lines.append(f"#   - {_entry(mod)} # {mod.what}; {kind}")
    return lines


def _active(mods: Sequence[Proposal]) -> list[str]:
    return ["", "mods:", *(f"  - {_entry(mod)}" for mod in mods)] if mods else []


def _entry(mod: Proposal) -> str:
    """An entry of `mods`; a change of the model's code may leave an exact one nothing to rewrite."""
    where = ", where: faster" if mod.use == INTERACTION_MOD else ""
    return f"{{use: {mod.use}{where}{', optional: true' if mod.exact else ''}}}"


def _rules(sites: Sequence[Site]) -> list[str]:
    """Rules that keep GEMMs that rarely gain from FP8, each only if it matches a site."""
    rules = []
    if any(site.n <= HEAD for site in sites):
        rules.append(f"  - {{match: {{max_n: {HEAD}}}, compute: keep, note: heads of few outputs}}")
    if any(site.k <= NARROW for site in sites):
        rules.append(f"  - {{match: {{max_k: {NARROW}}}, compute: keep, note: few input features}}")
    for kind in (GemmKind.BMM, GemmKind.ATTENTION, GemmKind.CONVOLUTION):
        alike = [site for site in sites if site.kind is kind]
        if alike and all(site.blocked for site in alike):
            rules.append(f"  - {{match: {{kind: {kind.value}}}, compute: keep, note: no weight of two dimensions}}")
    return rules


def _quoted(text: str) -> str:
    return json.dumps(text)  # a JSON string is a YAML string


def _one_line(name: str) -> str:
    return name if name.isprintable() and name.isascii() else json.dumps(name)
