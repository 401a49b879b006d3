"""Text that goes into comments and docstrings of generated code, where a name must not be able to end either."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from loka.templating.wrap import WIDTH

_PLAIN = re.compile(r"[A-Za-z0-9_.\-*/]+")
_LONGEST = 72  # characters of a name that are shown


def shown(name: str) -> str:
    """A name as prose shows it: as it is where it is plain, else quoted and escaped to ASCII; cut where it is long.

    The result is safe in a comment and, as it holds no backslash and no double quote, in a docstring.
    """
    if not name:
        return "(the model itself)"
    cut = name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."
    if _PLAIN.fullmatch(cut):
        return cut
    return "'" + ascii(cut)[1:-1].replace("\\", "/").replace('"', "'") + "'"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many there are: "layers.0.fmb.0, layers.1.fmb.0, ... (12)"."""
    head = ", ".join(shown(name) for name in names[:most])
    return head if len(names) <= most else f"{head}, ... ({len(names)} in all)"


def wrapped(text: str, indent: int, hanging: int = 0, first: int = 0) -> str:
    """`text` in lines of at most 120 characters, the first of which starts `first` columns further right.

    `text` is our prose around names that went through `shown`.
    """
    lines = textwrap.wrap(
        text,
        width=WIDTH - indent - first,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return ("\n" + " " * indent).join(lines)
