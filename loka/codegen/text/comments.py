"""Text in comments and docstrings of generated code; no name of the model can break out of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from loka.templating.wrap import WIDTH

_PLAIN = re.compile(r"[A-Za-z0-9_.\-*/]+")
_LONGEST = 72  # most characters of a shown name


def shown(name: str) -> str:
    """A name for prose: unchanged if plain, otherwise quoted and escaped to ASCII; long names are cut.

    The result is safe in a comment and, having no backslash and no double quote, in a docstring.
    """
    if not name:
        return "(the model itself)"
    cut = name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."
    if _PLAIN.fullmatch(cut):
        return cut
    return "'" + ascii(cut)[1:-1].replace("\\", "/").replace('"', "'") + "'"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names and the number of all: "a.0, a.1, a.2, ... (12 in all)"."""
    head = ", ".join(shown(name) for name in names[:most])
    return head if len(names) <= most else f"{head}, ... ({len(names)} in all)"


def wrapped(text: str, indent: int, hanging: int = 0, first: int = 0) -> str:
    """`text` wrapped to 120 columns at `indent`; the first line starts `first` columns further right.

    Names in `text` must have passed through `shown`.
    """
    lines = textwrap.wrap(
        text,
        width=WIDTH - indent - first,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return ("\n" + " " * indent).join(lines)
