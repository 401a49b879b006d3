"""The result for a forward that cannot become straight-line code."""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import LokaError


@dataclass(frozen=True, slots=True)
class Refused:
    """A module whose forward was not rewritten, with the reason.

    `reason` names the line of the user's code where there is one: "branch on tensor size at models.py:44 'if x.size(0)
    > 1024'".
    """

    owner: str  # qualified name; "" is the model
    reason: str
    inside: str | None = ""  # the inlined child whose forward the reason is about; "": the owner's own; None: unknown
    called: bool = True  # False if the model never calls the module

    def __str__(self) -> str:
        return f"NOT PATCHED region '{self.owner}': {self.reason}"


class CannotTraceError(LokaError):
    """Raised during tracing; `trace_forward` turns it into `Refused`."""

    inside: str | None = None  # as in `Refused`

    def inside_of(self, child: str) -> CannotTraceError:
        """The same error, about the forward of a child unless another is known already."""
        if self.inside is None:
            self.inside = child
        return self
