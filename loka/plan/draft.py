"""Drafts a first policy for a model: short, broad, and safe to start from."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from loka.devices.targets import DEFAULT_TARGET
from loka.errors import InputError
from loka.mods.registry import INTERACTION_MOD
from loka.numerics.enums import Compute
from loka.plan.format import format_share
from loka.plan.mod_proposals import Proposal
from loka.policy.checks import package_name
from loka.sites.site import GemmKind, Site

HEAD = 16  # output features up to which a GEMM is kept: a head's few outputs cost little and carry the prediction
NARROW = 16  # input features up to which a GEMM is kept
_VERBS = frozenset({"build", "make", "create", "get", "new", "load", "init", "construct", "factory", "main"})
_MODELS = frozenset({"model", "module", "net", "network", "nn", "the", "a", "my"})  # words that name no model
_COMPUTE = "auto: FP8 where the evidence allows it; fp8: wherever it can run; keep: as the model has it"
LARGEST = 5  # sites in the comment


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Arguments of `loka init`. Callables are "package.module:name"."""

    name: str
    factory: str
    inputs: str | None
    batch_size: int
    batches: str | None = None
    loss: str | None = None


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
        f"target: {DEFAULT_TARGET}",
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
        return [f"train: {{batches: {_quoted(options.batches)}, loss: {_quoted(options.loss)}}}"]
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
