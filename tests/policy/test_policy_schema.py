"""The JSON Schema: documented field by field, and of one mind with the loader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loka.graph.sites.site import GemmKind
from loka.mods.mod_settings import MOD_SCHEMAS
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Scaling
from loka.policy.policy_schema import json_schema
from loka.policy.site_schema import ScalingChoice, SiteKind

FULL = Path(__file__).with_name("full.yaml")
SCHEMA = json_schema(MOD_SCHEMAS)

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "default", "type", "enum", "const", "anyOf", "oneOf",
    "properties", "required", "additionalProperties", "items", "minItems", "minLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip


def faults(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What a JSON Schema finds wrong: the part of the standard that this schema uses, and no more."""
    unknown = set(schema) - _KNOWN
    assert not unknown, f"keywords that this test does not check: {unknown}"
    if "$ref" in schema:
        yield from faults(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], at)
    for word, count in (("anyOf", None), ("oneOf", 1)):
        if word in schema:
            fitting = sum(not list(faults(value, choice, at)) for choice in schema[word])
            if fitting == 0 or (count is not None and fitting != count):
                yield f"{at}: fits {fitting} of {word}"
    if "type" in schema:
        right = isinstance(value, _TYPES[schema["type"]]) and (
            schema["type"] == "boolean" or not isinstance(value, bool)
        )
        if not right:
            yield f"{at}: no {schema['type']}"
            return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{at}: {value} is none of the values"
    if isinstance(value, dict):
        yield from _faults_of_mapping(value, schema, at)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{at}: too short"
        for index, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{at}.{index}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: against the pattern"
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        yield f"{at}: too short"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if (
            not low <= value <= high
            or value == schema.get("exclusiveMinimum")
            or value == schema.get("exclusiveMaximum")
        ):
            yield f"{at}: out of range"


def _faults_of_mapping(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}: {name} is missing"
    for name, item in value.items():
        if name in properties:
            yield from faults(item, properties[name], f"{at}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{at}: unknown {name}"


def full() -> Any:
    """The example as JSON; YAML 1.1 takes 1e-2 for text."""
    data = yaml.safe_load(FULL.read_text())
    data["train"]["learning_rate"] = float(data["train"]["learning_rate"])
    return data


def test_full_example_loads_and_satisfies_the_schema() -> None:
    assert load_policy(FULL).train is not None
    assert list(faults(full(), SCHEMA)) == []


def test_full_example_has_every_key_of_the_language() -> None:
    refused = {"extends", "profile", "measurements"}
    definitions = [definition.get("properties", {}) for definition in (*SCHEMA["$defs"].values(), SCHEMA)]
    known = {name for each in definitions for name in each}
    written: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            written.update(node)
        for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(item)

    collect(full())
    assert known - refused == written


def test_schema_is_json_and_every_field_is_documented() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert "null" not in json.dumps(SCHEMA)
    for name, definition in {**SCHEMA["$defs"], "": SCHEMA}.items():
        for field, body in definition.get("properties", {}).items():
            assert body.get("title"), (name, field)
            assert body.get("description"), (name, field)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("name",), "my-ranker"),
        (("zzz",), 1),
        (("model", "factory"), "nowhere"),
        (("model", "batch_size"), 0),
        (("train", "learning_rate"), 0),
        (("target",), "h10"),
        (("defaults", "compute"), "fp4"),
        (("defaults", "padding"), 1),
        (("defaults", "budget", "mere"), -1),
        (("defaults", "match"), "a"),
        (("rules", 0, "fprop", "grad_output"), {}),
        (("rules", 0, "fprop", "input", "compute"), "fp8"),
        (("rules", 0, "fprop", "input", "amax"), 0),
        (("rules", 0, "match"), 3),
        (("rules", 0, "match"), []),
        (("rules", 3, "match", "kind"), "conv"),
        (("rules", 3, "match", "min_k"), 0),
        (("mods", 0, "use"), "no_bais"),
        (("mods", 0, "block"), 64),
        (("mods", 0, "final"), "kept"),
        (("mods", 0, "match"), {"kind": "linear"}),
        (("mods", 1, "block"), 100),
        (("mods", 5, "max_k"), 0),
    ],
)
def test_schema_and_loader_refuse_the_same(
    path: tuple[str | int, ...], value: Any, load: Callable[..., object], write: Callable[..., Path]
) -> None:
    data = full()
    load(json.dumps(data))  # the control: JSON is YAML
    node = data
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    assert list(faults(data, SCHEMA))
    with pytest.raises(Exception, match=r"^ranker.yaml:1:\d+: ") as caught:
        load_policy(write(json.dumps(data)))
    assert type(caught.value).__name__ == "PolicyError"


def test_a_policy_that_extends_may_leave_out_what_its_base_gives() -> None:
    assert list(faults({"extends": "base.yaml", "train": {"steps": 3}}, SCHEMA)) == []
    assert list(faults({"version": 1, "name": "a"}, SCHEMA))
    assert list(faults({**full(), "train": {"steps": 3}}, SCHEMA))


def test_words_are_those_of_the_other_rooms() -> None:
    assert {each.value for each in SiteKind} == {each.value for each in GemmKind}
    assert {each.value for each in ScalingChoice} - {"blockwise"} == {each.value for each in Scaling}
