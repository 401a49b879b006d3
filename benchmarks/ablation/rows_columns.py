"""Rows and columns of an ablation: subsets of a policy's mods, and ways of running the model.

`compile-bf16` is the adapted model in bfloat16 under torch.compile: it has the mods that change modules, but not those
that rewrite forwards. `loka-bf16` is the generated package with every GEMM kept and `fuse: always`, `loka-fp8` the
package of the policy as written. Each is planned from a policy in text that has only the row's mods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from loka.bench.options import listed
from loka.bench.packages import KEEP_AND_FUSE, policy_text, policy_tree
from loka.errors import InputError
from loka.mods.registry import ModKind, mod_of, names_of
from loka.policy.policy import Policy

NONE, ALL, EXACT = "none", "all", "exact"
KEEP_ALL: Mapping[str, Any] = {**KEEP_AND_FUSE, "fuse": "never"}


class Column(StrEnum):
    """A way of running the model with the mods of a row."""

    COMPILED = "compile-bf16"
    OURS = "loka-bf16"
    FP8 = "loka-fp8"


@dataclass(frozen=True, slots=True)
class AblationRow:
    """A subset of the policy's mods."""

    name: str  # none, all, exact, no_bias (that one alone), all-no_bias (all but that one)
    mods: tuple[str, ...]  # by their names in a policy, in its order
    title: str  # description for people


BASE = AblationRow(NONE, (), "none of the mods")


@dataclass(frozen=True, slots=True)
class Unit:
    """One measurement: the mods that matter in a column. `text` is its policy, `package` the name of that policy."""

    column: Column
    mods: tuple[str, ...]
    package: str
    text: str

    @property
    def label(self) -> str:
        """Name in lines of progress."""
        return f"{self.column.value} with {', '.join(self.mods) or 'no mods'}"


@dataclass(frozen=True, slots=True)
class Kinds:
    """The mods of a policy by kind."""

    adapting: frozenset[str]  # change modules: torch.compile sees them too
    exact: frozenset[str]  # keep the function, up to rounding

    @classmethod
    def of(cls, mods: Collection[str]) -> Kinds:
        """Sort these mods."""
        exact = frozenset(mod for mod in mods if mod_of(mod).exact)
        return cls(frozenset(mods) & frozenset(names_of(ModKind.MODULES)), exact)


def mods_of(policy: Policy) -> tuple[str, ...]:
    """The mods that a policy uses, each once, in its order. Raises InputError if there are none."""
    entries = cast("list[dict[str, Any]]", policy_tree(policy).get("mods") or [])
    mods = tuple(dict.fromkeys(str(entry["use"]) for entry in entries))
    if not mods:
        raise InputError(f"{policy.where('')}: the policy has no mods to ablate; declare some under mods:")
    return mods


def rows_of(mods: Sequence[str], exact: Collection[str]) -> tuple[AblationRow, ...]:
    """The rows, most important first; equal subsets are one row under the first name.

    In order: no mods, all, the exact ones, each alone, all but each.
    """
    kept = tuple(mod for mod in mods if mod in exact)
    rows = [BASE, AblationRow(ALL, tuple(mods), "all mods")]
    rows += [AblationRow(EXACT, kept, "the exact mods alone: the function stays the same")] if kept else []
    rows += [AblationRow(mod, (mod,), f"{mod} alone") for mod in mods]
    rows += [AblationRow(f"{ALL}-{mod}", tuple(each for each in mods if each != mod), f"all but {mod}") for mod in mods]
    merged: dict[tuple[str, ...], AblationRow] = {}
    for row in rows:
        first = merged.get(row.mods)
        merged[row.mods] = row if first is None else AblationRow(first.name, first.mods, f"{first.title}; {row.title}")
    return tuple(merged.values())


def chosen(names: str | None, rows: Sequence[AblationRow]) -> tuple[tuple[AblationRow, ...], tuple[Column, ...]]:
    """The rows and the columns of a comma-separated list; all rows if it names none, and likewise all columns.

    None selects everything. Raises InputError for an unknown name and for an empty list.
    """
    wanted = listed("--only", names, [*(row.name for row in rows), *(column.value for column in Column)])
    columns = tuple(column for column in Column if column.value in wanted)
    return tuple(row for row in rows if row.name in wanted) or tuple(rows), columns or tuple(Column)


def unit_of(policy: Policy, row: AblationRow, column: Column, kinds: Kinds, whole: bool) -> Unit:
    """The unit of a row in a column. `whole`: the row has all of the policy's mods.

    Rows that differ only in mods that a column ignores share a unit there.
    """
    mods = tuple(mod for mod in row.mods if column is not Column.COMPILED or mod in kinds.adapting)
    package = "_".join(["ablation", column.value.replace("-", "_"), *mods])
    return Unit(column, mods, package, _text(policy, package, mods, column, whole))


def _text(policy: Policy, package: str, mods: Collection[str], column: Column, whole: bool) -> str:
    """The policy with only these mods, as YAML.

    A profile describes the model with all mods, so any other row drops it.
    """
    rules = {Column.FP8: [], Column.OURS: [KEEP_AND_FUSE], Column.COMPILED: [KEEP_ALL]}[column]
    return policy_text(policy, package, mods, rules, profiled=whole and column is Column.FP8)
