"""LoKA: FP8 training and inference for large recommendation models, from a policy that people can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loka.probe.probe import Probe as Probe

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`loka.Probe`, imported when it is asked for: the command line starts without torch."""
    if name == "Probe":
        from loka.probe.probe import Probe

        return Probe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
