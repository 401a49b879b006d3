"""Validation errors of pydantic in the terms of policies, with positions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from loka.errors import Code
from loka.numerics.recipe import TRANSPOSED_FROM
from loka.policy import policy_schema
from loka.policy.mod_schema import ModSchemas, entry_model
from loka.policy.problems import Problem
from loka.policy.tree import Node, Path, follow, looks_like_number, node_at

_RENAMED = {"turned": "requantize_transpose"}  # fields by their former names
_CALLABLES = ("factory", "inputs", "batches", "loss", "test")
_OPERANDS = ("input", "weight", "grad_output")
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a mapping of keys to values",
}
_PATTERN_FORMS = 'write "layers.*", "re:...", a list of these, or (for match) a mapping such as {kind: linear}'
_NAME_FORMS = 'write "layers.*", "re:..." or a list of these'
_NO_FORM = ("union_tag_not_found", "union_tag_invalid")
_COMPARED = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def validation_errors(errors: Iterable[ErrorDetails], root: Node, complete: bool, mods: ModSchemas) -> list[Problem]:
    """One problem for each pydantic error that is not reported already.

    `complete` is False if a base could not be read, which may have the fields that seem to be missing. `mods` are those
    that the policy may list.
    """
    problems = []
    for error in errors:
        path, node = follow(root, error["loc"])
        reported = node.reported or node_at(node, ("use",)).reported
        if not reported and (complete or error["type"] != "missing"):
            problems.append(_problem_of(error, path, node, mods))
    return problems


def _problem_of(error: ErrorDetails, path: Path, node: Node, mods: ModSchemas) -> Problem:
    kind, name = error["type"], _name(path)
    if kind == "missing":
        field = str(error["loc"][-1])
        return Problem(node.key, f"{name}{field} is missing; add it{_example(field)}", Code.MISSING)
    if kind == "extra_forbidden" and path[0] == "mods":
        return Problem(
            node.key, _unknown_parameter(str(path[-1]), str(error["loc"][2]).strip("<>"), mods), Code.UNKNOWN_KEY
        )
    if kind == "extra_forbidden":
        return Problem(node.key, _unknown_key(path), Code.UNKNOWN_KEY)
    if kind in _NO_FORM and len(path) == 2 and path[0] == "mods":
        return _no_mod(node, mods)
    return Problem(node.place, f"{name}{_wrong_value(error, path, node)}", Code.VALUE)


def _wrong_value(error: ErrorDetails, path: Path, node: Node) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "enum":
        return _choice(node, str(context["expected"]))
    if kind in _COMPARED:
        key, words = _COMPARED[kind]
        return f"{describe(node)} is out of range; it must be {words} {context[key]:.12g}"
    if kind in ("string_too_short", "too_short"):
        return f"empty; give {'a value' if kind == 'string_too_short' else 'at least one'}, or remove the key"
    if kind == "loka":
        return error["msg"]
    if kind in _NO_FORM:
        forms = _NAME_FORMS if path[0] == "mods" else _PATTERN_FORMS
        return f"expected a pattern, found {describe(node)}; {forms}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, found {describe(node)}{_hint(kind, path, node)}"
    return f"{error['msg']}; found {describe(node)}: correct it"


def _no_mod(node: Node, mods: ModSchemas) -> Problem:
    """An entry of `mods` that names no mod."""
    if not isinstance(node.value, Mapping):
        return Problem(
            node.place,
            f"expected a mapping of keys to values, found {describe(node)}; write 'use: NAME' lines",
            Code.VALUE,
        )
    if "use" not in node.value:
        return Problem(node.key, f"use is missing; add it, as in 'use: {next(iter(mods))}'", Code.MISSING)
    use = node.value["use"]
    return Problem(use.place, f"use: {_choice(use, ', '.join(mods))}", Code.VALUE)


def describe(node: Node) -> str:
    """Short description of a value: `text "abc"`, `the number 3`, `a list`."""
    if isinstance(node.value, Mapping):
        return "a mapping"
    if isinstance(node.value, tuple):
        return "a list"
    if isinstance(node.value, str):
        return f"text {json.dumps(node.value[:60], ensure_ascii=False)}"
    if isinstance(node.value, bool):
        return node.text
    return f"the number {node.text}" if node.value is not None else "nothing"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, if any is close."""
    words = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word[:60].lower().replace("-", "_"), words, n=1, cutoff=0.6)
    return words[close[0]] if close else None


def known_keys(path: Path) -> tuple[str, ...]:
    """The keys allowed in the mapping at a path; () if unknown."""
    return _keys(_model_at(path))


def _keys(model: type[BaseModel] | None) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items()) if model else ()


def _model_at(path: Path) -> type[BaseModel] | None:
    model: type[BaseModel] | None = policy_schema.PolicySetting
    for step in path:
        field = model.model_fields.get(step) if model is not None and isinstance(step, str) else None
        if isinstance(step, str):
            model = next(_models(field.annotation), None) if field is not None else None
    return model


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """The models in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _unknown_key(path: Path) -> str:
    key, above = str(path[-1]), path[:-1]
    known = known_keys(above)
    close = nearest(key, known)
    new = _RENAMED.get(key)
    where = f" in {above[-1]}" if above and isinstance(above[-1], str) else " in a rule" if above else ""
    start = f"unknown key {json.dumps(key[:60], ensure_ascii=False)}{where}"
    if new in known:
        return f"{start}; it is called {new} now: write that"
    if close:
        return f"{start}; did you mean {close}?"
    if not above and key in known_keys(("defaults",)):
        return f"{start}; write it under defaults or in a rule"
    if key in _OPERANDS and above[:1] in (("defaults",), ("rules",)):
        return f"{start}; write it under a GEMM that takes it: fprop, dgrad or wgrad"
    if (new or key) == "requantize_transpose" and above[:1] in (("defaults",), ("rules",)):
        transposable = ", ".join(f"{gemm}: {{{operand}: ...}}" for gemm, operand in TRANSPOSED_FROM)
        it = new or "it"
        return f"{start}; write {it} site-wide, or where an operand is read along its other dimension: {transposable}"
    return f"{start}; remove it, or use one of {', '.join(known)}"


def _unknown_parameter(key: str, mod: str, mods: ModSchemas) -> str:
    known = _keys(entry_model(mod, mods))
    close = nearest(key, known)
    advice = f"did you mean {close}?" if close else f"remove it, or use one of {', '.join(known)}"
    return f"unknown key {json.dumps(key[:60], ensure_ascii=False)} in {mod}; {advice}"


def _choice(node: Node, expected: str) -> str:
    """pydantic lists the words as `'a', 'b' or 'c'`."""
    words = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    close = nearest(node.value, words) if isinstance(node.value, str) else None
    meant = f"did you mean {close}? It is " if close else "give "
    return f"{describe(node)} is not known; {meant}one of {', '.join(words)}"


def _hint(kind: str, path: Path, node: Node) -> str:
    if kind in ("int_type", "float_type") and isinstance(node.value, str):
        return "; remove the quotes" if node.quoted and looks_like_number(node.value) else "; write a number"
    if kind == "string_type":
        callable_here = path and path[-1] in _CALLABLES
        return "; write package.module:name" if callable_here else "; write one word, or text in quotes"
    if kind == "list_type":
        return "; begin each item with '- '"
    if kind == "model_type":
        keys = known_keys(path)
        return (
            f"; write 'key: value' lines, with keys of {', '.join(keys[:4])}, ..."
            if keys
            else "; write 'key: value' lines"
        )
    if kind == "bool_type":
        return "; write one of the two, without quotes"
    return f"; write {_EXPECTED[kind]}"


def _example(field: str) -> str:
    examples = {"version": ": 'version: 1'", "name": ", as in 'name: ranker'", "match": ", as in 'match: \"layers.*\"'"}
    return f", as in '{field}: \"package.module:name\"'" if field in _CALLABLES else examples.get(field, "")


def _name(path: Path) -> str:
    """The field of a message: the last key of its path."""
    keys = [step for step in path if isinstance(step, str)]
    return f"{keys[-1]}: " if keys else ""
