"""Weights that were frozen, or thawed, after their model was planned, and what that means for `Patch.verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.dispatch.bind.bound import parameter_of
from loka.dispatch.bind.check_model import AGAIN
from loka.dispatch.bind.unplanned import few, planned_model_of
from loka.dispatch.bound_state import BoundModule


@dataclass(frozen=True, slots=True)
class ChangedGradients:
    """The sites whose weights need a gradient now and needed none when planned, and the other way round."""

    frozen: tuple[str, ...] = ()
    thawed: tuple[str, ...] = ()

    def excuses(self, site: str, planned: Iterable[str], absent: Sequence[str]) -> bool:
        """True if GEMMs of a site did not run because weights were frozen: its own, or those before its input."""
        if not self.frozen or not absent or "fprop" in absent:
            return False
        return site in self.frozen or (tuple(absent) == ("dgrad",) and "wgrad" in planned)

    def words(self, missing: int) -> list[str]:
        """What changed, with advice; `missing`: planned GEMMs that did not run because of it."""
        lines = []
        if missing:
            lines.append(
                f"{_counted(self.frozen)} frozen since planning ({few(self.frozen)}), so that {missing} planned GEMMs "
                f"of the backward were not needed: {AGAIN}"
            )
        if self.thawed:
            lines.append(
                f"{_counted(self.thawed)} trained, and frozen when planned ({few(self.thawed)}), so that their wgrads "
                f"are not in the plan: {AGAIN}"
            )
        return lines


def changed_gradients(package: str, modules: Iterable[BoundModule]) -> ChangedGradients:
    """Compares the weights of a package's modules, bound in mode "train", with the plan; nothing without its plan."""
    planned = planned_model_of(package)
    frozen: list[str] = []
    thawed: list[str] = []
    for bound in modules if planned is not None else ():
        counters, before = bound.counters, f"{bound.name}." if bound.name else ""
        for site in counters.sites if counters.mode == "train" else ():
            names = [f"{before}{name}" for name, _ in counters.binding.shapes]
            # A site is called as its weight, as the module that holds it, or as a matrix in it: "kernels.2".
            weight = next((n for n in names if site in (n, n.removesuffix(".weight")) or site.startswith(f"{n}.")), "")
            parameter = parameter_of(bound.module, weight.removeprefix(before)) if weight else None
            if parameter is None or planned is None or weight not in planned.parameters:
                continue
            was_trained = weight not in planned.frozen
            if was_trained is not parameter.requires_grad:
                (frozen if was_trained else thawed).append(site)
    return ChangedGradients(tuple(frozen), tuple(thawed))


def _counted(sites: Sequence[str]) -> str:
    return "1 weight is" if len(sites) == 1 else f"the weights of {len(sites)} sites are"
