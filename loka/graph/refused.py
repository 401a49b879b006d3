"""The answer where a forward cannot become straight-line code."""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import LokaError


@dataclass(frozen=True, slots=True)
class Refused:
    """A module whose forward was not rewritten, and why, in the words of the user's code.

    `reason` names the place where there is one: "branch on tensor size at models.py:44 'if x.size(0) > 1024'".
    """

    owner: str  # qualified name; "" is the model
    reason: str

    def __str__(self) -> str:
        return f"NOT PATCHED region '{self.owner}': {self.reason}"


class CannotTraceError(LokaError):
    """Raised inside the tracing files, and turned into `Refused` by `trace_forward`."""
