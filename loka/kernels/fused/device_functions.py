"""Device functions that kernels call: a module of kernels contains those that its kernels use, each once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from loka.templating.templates import KERNELS, Templates

_TEMPLATE = KERNELS + "device_functions.py.j2"
_CALL = re.compile(r"(?<![\w.])\w+(?=\()")
_NAME = re.compile(r"^def (\w+)\(", re.MULTILINE)


def device_functions(templates: Templates) -> dict[str, str]:
    """The text of each function, by name, in the order of the template."""
    texts = [text.strip("\n") + "\n" for text in templates.render(_TEMPLATE, {}).split("\n\n\n")]
    return {match[1]: text for text in texts if (match := _NAME.search(text)) is not None}


def used_functions(texts: Iterable[str], functions: dict[str, str]) -> tuple[str, ...]:
    """The texts of the functions that these kernels call, and of those that these call in turn."""
    used, texts = set[str](), list(texts)
    while texts:
        called = set(_CALL.findall("\n".join(texts))) & functions.keys() - used
        used |= called
        texts = [functions[name] for name in called]
    return tuple(text for name, text in functions.items() if name in used)
