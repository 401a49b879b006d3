"""Says in LoKA's words why Python or torch.fx stopped while a forward was traced."""

from __future__ import annotations

import re

from loka.sites.callables import message_of

_LONGEST = 160  # characters quoted of an error that is not known
_TRACED = r"(?:Proxy|_ViewsInPlace|Attribute)\b"
# Messages of Python 3.11 to 3.13, numpy 2, and torch 2.11 and newer.
_KNOWN = (
    (r"argument of type: <class '(?:[^']*\.)?(\w+)'>", "an object of class {0} is passed to an operation or a child"),
    (r"item assignment", "assignment into a tensor"),
    (r"'len' is not supported", "len of a tensor"),
    (r"__array_struct__|__array__", "numpy is called on a tensor"),
    (r"__cuda_array_interface__", "a new tensor is made of a traced value"),
    (r"Keys for dictionaries|^Proxy\(", "a tensor or a size is the key of a dict"),
    (rf"(?:number|string|integer|indices|format|__round__|__index__).*{_TRACED}|{_TRACED}.*(?:integer|__)", ""),
)
_NUMBER = "Python needs a plain number where a traced value stands (compute this number in __init__, or by torch)"


def reason_of(error: BaseException) -> str:
    """The reason why a forward cannot be traced, for an error that its code raised on traced values."""
    text = message_of(error)
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return words.format(*found.groups()) or _NUMBER
    return f"its code does not run on traced values: it raises {type(error).__name__} ('{text[:_LONGEST]}')"
