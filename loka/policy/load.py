"""Loads a policy file as a `Policy`, with all checks that do not need the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from loka.devices.targets import DEFAULT
from loka.errors import Code
from loka.numerics.enums import Fuse
from loka.policy import policy_schema
from loka.policy.communication import GatherSetting
from loka.policy.documents import Documents, read_documents
from loka.policy.expand import RuleOrigin, built_in, expand, shown_value
from loka.policy.mod_schema import AutoModsSetting, ModFields, ModSchemas, own_parameters
from loka.policy.policy import (
    GATHER,
    ExecutionSpec,
    Match,
    ModelSpec,
    ModParameter,
    ModRule,
    Pattern,
    Policy,
    Rule,
    SizeBound,
)
from loka.policy.problems import Place, PolicyError, Problem
from loka.policy.site_schema import Criteria, RuleSetting, SiteSetting
from loka.policy.tree import Node, node_at, plain
from loka.policy.tree import Path as TreePath
from loka.policy.validation_errors import validation_errors

DEFAULT_BATCH_SIZE = 4096
PLAN_FORMAT = "loka.plan"  # format of loka.plan.serialize, a room above this one
EVERY_SITE = Match("*")


def read_policy(path: Path | str, mods: ModSchemas) -> Policy:
    """Read a policy and the bases that it extends.

    Does not run the code that they name, and needs neither torch nor a GPU. Problems that depend on the model (patterns
    that match nothing, settings that contradict each other) are found by `make_plan`.

    Args:
        path: The policy, a YAML file.
        mods: The schemas of the mods that it may list.

    Raises:
        PolicyError: With all problems, each with its `file:line:column`; also if the file, or one that it extends,
            cannot be read.
    """
    documents = read_documents(os.fspath(path), policy_schema.policy_setting(mods).model_fields)
    problems = list(documents.problems)
    setting = None
    if documents.tree is not None:
        _refuse_plan(documents.tree)
        setting = _validate(documents.tree, documents.complete, problems, mods)
        problems += _overridden(documents.bases, problems, mods)
    if problems or setting is None or documents.tree is None:
        raise PolicyError(_in_order(problems, documents))
    return _policy(Path(path), setting, documents.tree, documents, mods)


def _refuse_plan(tree: Node) -> None:
    """Raises PolicyError for a plan.json, which is YAML too, instead of a problem for each of its keys."""
    node = node_at(tree, ("format",))
    if node.value == PLAN_FORMAT:
        advice = "name the policy that it was generated from (its policy_files)"
        raise PolicyError(
            [Problem(Place(node.key.file, 0, 0), f"a plan of `loka generate`, no policy; {advice}", Code.FILE)]
        )


def _validate(
    tree: Node, complete: bool, problems: list[Problem], mods: ModSchemas
) -> policy_schema.PolicySetting | None:
    try:
        return policy_schema.policy_setting(mods).model_validate(plain(tree))
    except ValidationError as error:
        problems += validation_errors(error.errors(include_url=False), tree, complete, mods)
        return None


def _overridden(bases: tuple[Node, ...], known: list[Problem], mods: ModSchemas) -> list[Problem]:
    """Wrong values and unknown keys of bases that the policy overrides, so that they are not in the merged tree.

    A base need not be complete, and two of its values may fit only together with what overrides one of them.
    """
    places = {each.place for each in known}
    found: list[Problem] = []
    for base in bases:
        try:
            policy_schema.policy_setting(mods).model_validate(plain(base))
        except ValidationError as error:
            wrong = [
                each
                for each in error.errors(include_url=False)
                if each["type"] != "loka" or not isinstance(node_at(base, each["loc"]).value, Mapping)
            ]
            found += validation_errors(wrong, base, False, mods)
    return [each for each in found if each.place not in places]


def _in_order(problems: list[Problem], documents: Documents) -> list[Problem]:
    """The policy's problems first, then those of its bases; in each file from top to bottom."""
    files = {name: index for index, name in enumerate(documents.named)}
    return sorted(problems, key=lambda each: (files.get(each.place.file, len(files)), each.place))


def _policy(
    path: Path, setting: policy_schema.PolicySetting, tree: Node, documents: Documents, mods: ModSchemas
) -> Policy:
    uses = {model: use for use, model in mods.items()}
    batches = setting.train.batches if setting.train else None
    batch_size = setting.model.batch_size or DEFAULT_BATCH_SIZE
    model = ModelSpec(setting.model.factory, setting.model.inputs, batch_size, batches)
    run, entries, sent = setting.execution, setting.mods or [], setting.communication
    rules = (_rule(rule, tree, index) for index, rule in enumerate(setting.rules or []))
    return Policy(
        version=setting.version,
        name=setting.name,
        path=path,
        files=documents.files,
        model=model,
        train=setting.train,
        target=setting.target or DEFAULT.name,
        execution=ExecutionSpec(run.mode, run.host_ms or 0.0, run.gpu_ms or 0.0) if run else None,
        ne_percent=setting.budget.ne_percent if setting.budget else None,
        rules=(_defaults(setting.defaults, tree), *rules),
        mods=tuple(
            _mod(mod, uses[type(mod)], tree, index) for index, mod in enumerate(entries) if isinstance(mod, ModFields)
        ),
        units=_patterns(setting.units, tree, ("units",)) if setting.units else (),
        gathers=tuple(_gather(each, tree, index) for index, each in enumerate(sent.weights or [] if sent else [])),
        exchange=sent.embeddings if sent else None,
        auto_mods=_auto_mods(entries, setting.defaults),
        profile=setting.profile,
        measurements=setting.measurements,
        tree=tree,
        named=documents.named,
    )


def _defaults(setting: SiteSetting | None, tree: Node) -> Rule:
    """The built-in settings and the policy's own defaults, as a rule for every site."""
    leaves, place = built_in(), Place(tree.place.file, 0, 0)
    if setting is not None:
        leaves += expand(setting, RuleOrigin(tree, ("defaults",), "defaults"))
        place = node_at(tree, ("defaults",)).key
    return Rule(EVERY_SITE, True, None, "defaults", place, leaves)


def _rule(setting: RuleSetting, tree: Node, index: int) -> Rule:
    path: TreePath = ("rules", index)
    match = _match(setting.match, tree, (*path, "match"))
    source = f"rule {index + 1}: {match.text}"
    place = node_at(tree, path).place
    leaves = expand(setting, RuleOrigin(tree, path, source))
    return Rule(match, bool(setting.optional), setting.note, source, place, leaves)


def _gather(setting: GatherSetting, tree: Node, index: int) -> Rule:
    path: TreePath = ("communication", "weights", index)
    match = EVERY_SITE if setting.match is None else _match(setting.match, tree, (*path, "match"))
    origin = RuleOrigin(tree, path, f"communication: {match.text}")
    leaves = (origin.leaf(GATHER, setting.carry, "carry"),)
    optional = bool(setting.optional) or setting.match is None
    return Rule(match, optional, None, origin.source, node_at(tree, path).place, leaves)


def _auto_mods(entries: Sequence[ModFields | AutoModsSetting], defaults: SiteSetting | None) -> bool:
    """True if exact mods may be planned without being asked for: the last `auto` counts, and `fuse: auto`."""
    said = [entry.auto for entry in entries if isinstance(entry, AutoModsSetting)]
    fuse = defaults.fuse if defaults is not None else None
    return (said[-1] if said else True) and fuse in (None, Fuse.AUTO)


def mod_parameters(setting: ModFields) -> tuple[tuple[str, ModParameter], ...]:
    """A mod's own parameters with their values."""
    own = ((name, getattr(setting, name)) for name in own_parameters(type(setting)))
    return tuple((name, value.value if isinstance(value, StrEnum) else value) for name, value in own)


def _mod(setting: ModFields, use: str, tree: Node, index: int) -> ModRule:
    path: TreePath = ("mods", index)
    return ModRule(
        use=use,
        match=_patterns(setting.match, tree, (*path, "match")) if setting.match is not None else (),
        except_=_patterns(setting.except_, tree, (*path, "except")) if setting.except_ is not None else (),
        settings=mod_parameters(setting),
        optional=bool(setting.optional),
        note=setting.note,
        source=f"mod {index + 1}: {use}",
        place=node_at(tree, path).place,
    )


def _match(value: str | list[str] | Criteria, tree: Node, path: TreePath) -> Match:
    if not isinstance(value, Criteria):
        patterns = _patterns(value, tree, path)
        return Match(", ".join(pattern.text for pattern in patterns), patterns)
    given = ((name, getattr(value, name)) for name in Criteria.model_fields)
    text = ", ".join(f"{name}: {_shown(part)}" for name, part in given if part is not None)
    patterns = _patterns(value.name, tree, (*path, "name")) if value.name is not None else ()
    return Match(
        text, patterns, value.kind.value if value.kind else None, tuple(SizeBound(*each) for each in value.bounds)
    )


def _patterns(value: str | list[str], tree: Node, path: TreePath) -> tuple[Pattern, ...]:
    if isinstance(value, str):
        return (Pattern.of(value, node_at(tree, path).place),)
    return tuple(Pattern.of(text, node_at(tree, (*path, index)).place) for index, text in enumerate(value))


def _shown(part: object) -> str:
    return " or ".join(part) if isinstance(part, list) else shown_value(part)
