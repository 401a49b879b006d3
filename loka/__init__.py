"""LoKA: FP8 training and inference for large recommendation models, from a policy that people can read.

The names below are the public API (docs/api.md); a generated package and what its `apply` returns are
the rest of it. Each is imported when it is first used: `import loka` takes neither torch nor anything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from loka.version import __version__

if TYPE_CHECKING:
    from loka.codegen.generation import GeneratedPackage as GeneratedPackage
    from loka.codegen.generation import generate as generate
    from loka.dispatch.dispatch_errors import BindError as BindError
    from loka.dispatch.dispatch_errors import DtypeError as DtypeError
    from loka.dispatch.dispatch_errors import FrozenWeightError as FrozenWeightError
    from loka.dispatch.dispatch_errors import LokaWarning as LokaWarning
    from loka.dispatch.dispatch_errors import NewModelWarning as NewModelWarning
    from loka.dispatch.dispatch_errors import NonFiniteError as NonFiniteError
    from loka.dispatch.dispatch_errors import VerifyError as VerifyError
    from loka.dispatch.guard.guard import Guard as Guard
    from loka.dispatch.guard.guard import GuardEvent as GuardEvent
    from loka.dispatch.guard.guard import GuardReport as GuardReport
    from loka.dispatch.portable import portable as portable
    from loka.errors import CheckFailedError as CheckFailedError
    from loka.errors import InputError as InputError
    from loka.errors import LokaError as LokaError
    from loka.mods.adapt import AdaptError as AdaptError
    from loka.mods.adapt import ConvertError as ConvertError
    from loka.mods.policy_loader import load_policy as load_policy
    from loka.plan.planner import make_plan as make_plan
    from loka.policy.problems import PolicyError as PolicyError
    from loka.probe.probe import Probe as Probe
    from loka.probe.probe import ProbeWarning as ProbeWarning
    from loka.trial.trial import fp8 as fp8

_MODULES = {
    "loka.codegen.generation": ("GeneratedPackage", "generate"),
    "loka.dispatch.dispatch_errors": (
        "BindError",
        "DtypeError",
        "FrozenWeightError",
        "LokaWarning",
        "NewModelWarning",
        "NonFiniteError",
        "VerifyError",
    ),
    "loka.dispatch.guard.guard": ("Guard", "GuardEvent", "GuardReport"),
    "loka.dispatch.portable": ("portable",),
    "loka.errors": ("CheckFailedError", "InputError", "LokaError"),
    "loka.mods.adapt": ("AdaptError", "ConvertError"),
    "loka.plan.planner": ("make_plan",),
    "loka.mods.policy_loader": ("load_policy",),
    "loka.policy.problems": ("PolicyError",),
    "loka.probe.probe": ("Probe", "ProbeWarning"),
    "loka.trial.trial": ("fp8",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdaptError",
    "BindError",
    "CheckFailedError",
    "ConvertError",
    "DtypeError",
    "FrozenWeightError",
    "GeneratedPackage",
    "Guard",
    "GuardEvent",
    "GuardReport",
    "InputError",
    "LokaError",
    "LokaWarning",
    "NewModelWarning",
    "NonFiniteError",
    "PolicyError",
    "Probe",
    "ProbeWarning",
    "VerifyError",
    "__version__",
    "fp8",
    "generate",
    "load_policy",
    "make_plan",
    "portable",
]


def __getattr__(name: str) -> object:
    """A public name, from its module (PEP 562). Raises AttributeError for any other."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
