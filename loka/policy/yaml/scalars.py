"""What an unquoted word means: the core schema of YAML 1.2, and what YAML 1.1 reads differently is refused."""

from __future__ import annotations

import math
import re

SCALAR_TAGS = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null")}

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {
    word: value for name, value in (("true", True), ("false", False)) for word in (name, name.title(), name.upper())
}
_BOOL_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_DIGITS = 18  # fits 64 bits

ScalarValue = str | int | float | bool | None


class ScalarError(ValueError):
    """A word that has no meaning here; the message says what to write."""


def resolve(text: str) -> ScalarValue:
    """The value of an unquoted word.

    Raises ScalarError for numbers that are not finite or too long, and for words that YAML readers disagree about.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text in {form for word in _BOOL_1_1 for form in (word, word.title(), word.upper())}:
        raise ScalarError(
            f"{text} is a boolean to some YAML readers and text to others; "
            f'write {_BOOL_1_1[text.lower()]}, or "{text}" in quotes if text is meant'
        )
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    if _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ScalarError(_too_long(text))
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            raise ScalarError(f"{_short(text)} is too large for a number; give a finite one")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ScalarError(f'{text} is not finite; give a finite number, or "{text}" in quotes if text is meant')
    return text


def resolve_tagged(text: str, tag: str) -> ScalarValue:
    """The value of a word under one of the core schema's tags; raises ScalarError where they disagree."""
    name = SCALAR_TAGS[tag]
    if name == "str":
        return text
    value = resolve(text)
    if name == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if {"int": int, "float": float, "bool": bool, "null": type(None)}[name] is not type(value):
        raise ScalarError(f"{_short(text)!r} is no !!{name}; remove the tag")
    return value


def looks_like_number(text: str) -> bool:
    """Whether the text would be a number without its quotes."""
    return bool(_DECIMAL.fullmatch(text) or _FLOAT.fullmatch(text))


def _decimal(text: str) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits.startswith("0") and digits.strip("0"):
        raise ScalarError(
            f"{_short(text)} is octal to some YAML readers and decimal to others; remove the leading zeros"
        )
    if len(digits) > _MAX_DIGITS:
        raise ScalarError(_too_long(text))
    return int(text)


def _too_long(text: str) -> str:
    return f"{_short(text)} is too large for a number here; give one of at most {_MAX_DIGITS} digits"


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
