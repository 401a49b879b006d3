"""Writes docs/api.md from the docstrings of the public API: `make docs-api`. A test compares the page with them."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

import loka
from loka.dispatch import Patch

PAGE = Path(__file__).with_name("api.md")
WIDTH = 100
HEAD = """\
# The Python API

`import loka` has these names; each is imported when it is first used. `make docs-api` writes this
page from the docstrings.
"""
TRAINING = """\
## In a training script

A generated package has `apply(model, mode="train", strict=False)`, which returns a `Patch`, and,
where the policy's mods change modules, `adapt(model)` and `convert(state_dict)`
([mods.md](mods.md)), and `qcomms()` where the policy says what TorchRec's ranks exchange
([policy.md](policy.md#what-ranks-send-each-other)). With `strict`, GEMMs of the model that the plan
does not know are a `BindError` instead of a warning.
"""
ERRORS = """\
## Errors

All that LoKA refuses is a `LokaError`; its message says what is wrong, where, and what to do. The
command line prints it and leaves with `exit_status`.
"""


class _Bare(str):
    """An annotation that `inspect` prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature_of(name: str, function: object, method: bool = False) -> str:
    """`name(...) -> ...`, a parameter a line where it is longer than the page is wide."""
    found = inspect.signature(function)  # type: ignore[arg-type]
    if inspect.isclass(function):
        found = found.replace(return_annotation=inspect.Signature.empty)
    parameters = list(found.parameters.values())[1 if method else 0 :]
    bare = [each.replace(annotation=_annotation(each.annotation)) for each in parameters]
    found = found.replace(parameters=bare, return_annotation=_annotation(found.return_annotation))
    line = f"{name}{found}"
    if len(line) <= WIDTH:
        return line
    _, arrow, result = line.rpartition(" -> ")
    keyword_only = [each.kind is inspect.Parameter.KEYWORD_ONLY for each in bare]
    lines = [f"    {each}," for each in bare]
    if True in keyword_only:
        lines.insert(keyword_only.index(True), "    *,")
    return "\n".join([f"{name}(", *lines, f"){arrow}{result}" if arrow else ")"])


def _annotation(annotation: object) -> object:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def text_of(documented: object) -> str:
    """A docstring as Markdown: paragraphs filled to the width, indented code as it is, sections as lists."""
    parts = []
    for block in inspect.getdoc(documented).split("\n\n"):  # type: ignore[union-attr]
        lines = block.split("\n")
        heading = re.fullmatch(r"(Args|Raises|Warns|Attributes):", lines[0])
        if heading:
            parts.append("\n".join([f"{heading[1]}:", "", *_items(lines[1:])]))
        elif all(line.startswith("    ") for line in lines):
            parts.append(block)
        else:
            parts.append(textwrap.fill(" ".join(lines), WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts)


def _items(lines: list[str]) -> list[str]:
    """`name: text`, whose further lines are indented, as a list."""
    items: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        if line.startswith(" "):
            items[-1] += f" {line.strip()}"
        else:
            name, _, text = line.partition(": ")
            items.append(f"- `{name}`: {text}")
    return [textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for item in items]


def members_of(cls: type) -> list[str]:
    """The public methods and properties of a class, in the order in which they are written."""
    parts = []
    for name, member in vars(cls).items():
        if name.startswith("_") or not (callable(member) or isinstance(member, property)):
            continue
        title = name if isinstance(member, property) else signature_of(name, member, method=True)
        parts += [f"#### `{cls.__name__}.{name}`", *([] if title == name else [_code(title)]), text_of(member)]
    return parts


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def page() -> str:
    """The whole page."""
    public = {name: getattr(loka, name) for name in loka.__all__ if name != "__version__"}
    errors = {name: each for name, each in public.items() if isinstance(each, type) and issubclass(each, Exception)}
    functions = [name for name, each in public.items() if inspect.isfunction(each)]
    classes = [name for name in public if name not in errors and name not in functions]
    parts = [HEAD.strip()]
    for name in sorted(functions):
        parts += [f"### `loka.{name}`", _code(signature_of(name, public[name])), text_of(public[name])]
    for name in sorted(classes):
        parts += [f"### `loka.{name}`", _code(signature_of(name, public[name])), text_of(public[name])]
        parts += members_of(public[name])
    parts += [TRAINING.strip(), "### `loka.dispatch.Patch`", text_of(Patch), *members_of(Patch), ERRORS.strip()]
    for name, error in errors.items():
        status = f" Exit status {error.exit_status}." if issubclass(error, loka.LokaError) else ""
        parts += [f"### `loka.{name}`", f"Base class: `{error.__mro__[1].__name__}`.{status}", text_of(error)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
