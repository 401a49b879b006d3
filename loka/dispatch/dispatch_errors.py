"""Errors and warnings of binding and of its checks."""

from __future__ import annotations

from collections.abc import Sequence

from loka.errors import CheckFailedError, Code, InputError, LokaError

SHOWN = 20  # most reasons printed in one message; the rest are counted
NAMED = 3  # most names printed for a reason


class LokaWarning(UserWarning):
    """Something works, but not as a user would expect: for example slowly, or on a device the plan is not for."""


class NoFp8Warning(LokaWarning):
    """A package has no GEMM in FP8: the plan keeps all of them in the model's own dtype."""


class NewModelWarning(LokaWarning):
    """Mods have changed modules of a model: the result is another model, which has to be trained."""


class _ProblemsError(LokaError):
    """An error that lists all problems found, one line for each reason."""

    def __init__(self, headline: str, code: Code | None = None, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(listed(headline, self.problems), code)


class BindError(InputError, _ProblemsError):
    """A package cannot be bound to a model, which is unchanged. `problems`: every reason, one line each."""


class DtypeError(InputError, RuntimeError):
    """A patched linear got an input of another dtype than its weight, without autocast; torch raises RuntimeError."""


class FrozenWeightError(InputError):
    """A module with frozen FP8 weights was called in a way that would lose a gradient."""


class VerifyError(CheckFailedError, _ProblemsError):
    """A planned FP8 GEMM did not run, the model changed, or a frozen weight is stale. `problems`: each finding."""


class NonFiniteError(CheckFailedError):
    """A NaN or an infinity occurred at a site. `site` and `gemm` name the first one."""

    def __init__(self, message: str, site: str, gemm: str) -> None:
        self.site = site
        self.gemm = gemm
        super().__init__(message, Code.NOT_FINITE)


def listed(headline: str, problems: Sequence[str]) -> str:
    """The headline, and at most `SHOWN` lines: one for each reason, with the names of the first that it is of."""
    names: dict[str, list[str]] = {}  # by what follows them: all of a problem where no name is before it
    for problem in problems:
        name, colon, reason = problem.partition(": ")
        names.setdefault(colon + reason if colon else problem, []).append(name if colon else "")
    lines = [f"  {_named(each)}{reason}" for reason, each in names.items()]
    more = sum(map(len, list(names.values())[SHOWN:]))
    rest = [f"  ... and {more} more (the exception's `problems` has them all)"] if more else []
    return "\n".join([headline, *lines[:SHOWN], *rest])


def _named(names: Sequence[str]) -> str:
    first = ", ".join(names[:NAMED])
    return first if len(names) <= NAMED else f"{first} and {len(names) - NAMED} more"
