"""Applies one entry of a policy's `mods` to a model's sites, and collects changes and reasons."""

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
    """Collects the changes of one entry, and the sites it does not change.

    `usual` are reasons that are not reported if other sites were changed, as a broad pattern does not mean such sites.
    """

    def __init__(self, model: ModelInChange, rule: ModRule, usual: Collection[str] = ()) -> None:
        self.rewritten: list[RewriteResult] = []
        self._model, self._rule, self._usual = model, rule, usual
        self._left: dict[str, str] = {}  # site -> reason

    @property
    def unchanged(self) -> tuple[Unchanged, ...]:
        """The sites that are not changed, except those with usual reasons if others were changed."""
        changed = {site for each in self.rewritten for site in (*each.sites, each.site)}
        return tuple(
            Unchanged(name, reason)
            for name, reason in self._left.items()
            if name not in changed and (reason not in self._usual or self._rule.names(name) or not self.rewritten)
        )

    def leave(self, names: Collection[str], reason: str) -> None:
        """Record the reason why sites are not changed; the first reason counts."""
        for name in names:
            self._left.setdefault(name, reason)

    def wanted(self) -> list[Site]:
        """The sites of the entry that can be rewritten; a merged site only if the entry matches all of its members."""
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
        """An owner's forward, the shapes of its locals, its sites' sizes, and their names in the model.

        Yields nothing if it cannot be traced with any of the sites; sites that prevent tracing are left out.
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
        """Apply a change that replaces sites by `site`, or leave them if the function would change.

        `what` describes the change, without names that differ between layers.
        """
        reason = self._model.take(owned, members, site)
        if reason is not None:
            self.leave(members, reason)
            return
        self.rewritten.append(RewriteResult(owned.change.mod, owned.owner, tuple(members), site.name, what))
