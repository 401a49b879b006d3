"""Warning that a generated package has nothing in FP8."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from loka.dispatch.bind.bound import CallCounters
from loka.dispatch.dispatch_errors import NoFp8Warning


@contextmanager
def fp8_not_expected() -> Iterator[None]:
    """Context without NoFp8Warning: for packages that are meant to have no FP8, or of which it was said before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoFp8Warning)
        yield


def warn_without_fp8(package: str, bound: Iterable[CallCounters], stacklevel: int) -> None:
    """Warn (NoFp8Warning) if none of the bound modules, each given by its counters, has a GEMM planned in FP8."""
    modules = list(bound)
    if any(counters.planned(index) for counters in modules for index in range(len(counters.sites))):
        return
    rest = "nothing in this model changes"
    if modules:
        forwards = "1 module gets a" if len(modules) == 1 else f"{len(modules)} modules get a"
        rest = f"{forwards} generated forward with its GEMMs in the model's own dtype"
    warnings.warn(
        f"{package}: the package holds no FP8 site: {rest}; run loka plan to see why",
        NoFp8Warning,
        stacklevel=stacklevel + 1,
    )
