"""Carrying out one entry of a policy's `mods` on a model's sites: what was made of which, what stays and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from loka.graph.ir import ForwardIR
from loka.graph.refused import Refused
from loka.graph.trace.observed_shapes import Shape
from loka.mods.adaptation import RewriteResult, Unchanged
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.rewriting_tools import Size
from loka.mods.rewriting.site_change import OwnedChange
from loka.policy.policy import ModRule
from loka.sites.site import Site


class SiteOutcome:
    """What one entry makes, as it is found.

    `usual` are reasons that go untold where other sites were changed: no broad pattern can mean sites with these.
    """

    def __init__(self, model: ModelInChange, rule: ModRule, usual: Collection[str] = ()) -> None:
        self.rewritten: list[RewriteResult] = []
        self._model, self._rule, self._usual = model, rule, usual
        self._left: dict[str, str] = {}  # site -> why

    @property
    def unchanged(self) -> tuple[Unchanged, ...]:
        """What is left, but for what goes untold; all of it where nothing was changed."""
        changed = {site for each in self.rewritten for site in (*each.sites, each.site)}
        return tuple(
            Unchanged(name, reason)
            for name, reason in self._left.items()
            if name not in changed and (reason not in self._usual or self._rule.names(name) or not self.rewritten)
        )

    def leave(self, names: Collection[str], reason: str) -> None:
        """Say why sites stay as they are; what was said first counts."""
        for name in names:
            self._left.setdefault(name, reason)

    def wanted(self) -> list[Site]:
        """The sites that the entry is for and that can be rewritten; one of several where it is for all of these."""
        wanted = []
        for site in self._model.sites.values():
            names = site.members or (site.name,)
            meant = [name for name in names if self._rule.wants(name)]
            reason = self._model.unsupported_reason(site)
            if reason is not None:
                self.leave(meant, reason)
            elif len(meant) < len(names):
                self.leave(meant, f"it is one GEMM with others, {site.name!r}, that are not all meant")
            else:
                wanted.append(site)
        return wanted

    def traced(
        self, names: Sequence[str], owner: str
    ) -> Iterator[tuple[ForwardIR, dict[str, Shape], dict[str, Size], dict[str, str]]]:
        """An owner's forward, the shapes of its locals, its sites' sizes, and their names in the model by those in it.

        Nothing where it cannot be traced, or not with any of the sites; sites that stand in the way are left out.
        """
        model, names = self._model, list(names)
        while names:
            called = {model.called(name, owner): name for name in names}
            seen = model.look(owner, names)
            if not isinstance(seen, Refused):
                sizes = {inner: Size(model.sites[name].k, model.sites[name].n) for inner, name in called.items()}
                yield *seen, sizes, called
                return
            odd = [name for inner, name in called.items() if seen.reason.startswith(f"'{inner}' ")]
            self.leave(odd or names, seen.reason)
            names = [name for name in names if name not in odd] if odd else []

    def take(self, owned: OwnedChange, members: Sequence[str], site: Site, what: str) -> None:
        """Carry out a change, after which sites are `site`, or leave them where it is not the same function.

        `what` is the change for people, without names that differ from layer to layer.
        """
        reason = self._model.take(owned, members, site)
        if reason is not None:
            self.leave(members, reason)
            return
        self.rewritten.append(RewriteResult(owned.change.mod, owned.owner, tuple(members), site.name, what))
