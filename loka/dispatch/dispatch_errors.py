"""What binding can refuse, and what its checks can find."""

from __future__ import annotations

from collections.abc import Sequence

from loka.errors import CheckFailedError, InputError

SHOWN = 20  # problems printed in one message; the rest are counted


class LokaWarning(UserWarning):
    """Something works, but not as a user would expect: slow, or on a device that the plan was not made for."""


class NewModelWarning(LokaWarning):
    """Mods have changed modules of a model: what comes out is another model, which has to be trained."""


class BindError(InputError):
    """A package cannot be bound to a model. `problems` holds every reason, one line each; the model is unchanged."""

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(listed(headline, self.problems))


class DtypeError(InputError, RuntimeError):
    """A patched linear got an input of another dtype than its weight, without autocast; torch raises RuntimeError."""


class FrozenWeightError(InputError):
    """A module with frozen FP8 weights was called where a gradient would be lost."""


class VerifyError(CheckFailedError):
    """A planned FP8 GEMM did not run, the model changed, or a frozen weight is stale; `problems` has each finding."""

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(listed(headline, self.problems))


class NonFiniteError(CheckFailedError):
    """A NaN or an infinity was seen at a site. `site` and `gemm` name the first one."""

    def __init__(self, message: str, site: str, gemm: str) -> None:
        self.site = site
        self.gemm = gemm
        super().__init__(message)


def listed(headline: str, problems: Sequence[str]) -> str:
    """The headline with the problems under it, cut at `SHOWN`."""
    lines = [headline, *(f"  {problem}" for problem in problems[:SHOWN])]
    if len(problems) > SHOWN:
        lines.append(f"  ... and {len(problems) - SHOWN} more (the exception's `problems` has them all)")
    return "\n".join(lines)
