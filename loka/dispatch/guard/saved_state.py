"""The state of a guard, as `Guard.state_dict` returned it and a checkpoint held it: read, and checked as data is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loka.dispatch.guard.verdicts import Past
from loka.errors import InputError

OTHER_STATE = (
    "apply the package that was guarded when the state was saved; or go on without the state, with all sites in FP8 "
    "and no past"
)


@dataclass(frozen=True, slots=True)
class SavedModule:
    """What a state says of a module."""

    sites: tuple[str, ...]
    fallen: bool
    falls: int
    good: int
    past: Past


def read_state(state: Any, package: str) -> tuple[int, dict[str, SavedModule]]:
    """The steps and modules of a `state_dict`; raises InputError."""
    try:
        of, step = str(state["package"]), int(state["step"])
        modules = {
            str(each["name"]): SavedModule(
                tuple(map(str, each["sites"])),
                bool(each["fallen"]),
                int(each["falls"]),
                int(each["good"]),
                Past.of(each["judge"]),
            )
            for each in state["modules"]
        }
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError("guard: this is no state of a guard: give what its state_dict returned") from error
    if of != package:
        raise InputError(f"guard: the state is of the package {of!r}, and the patch of {package!r}: {OTHER_STATE}")
    return step, modules
