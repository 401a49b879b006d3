"""Lines of `loka plan` about mods: what each changed, what it left and why, and its gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loka.plan.plan import Plan

_SHOWN = 5  # most reasons shown for a mod


def print_mods(plan: Plan) -> None:
    """Print a line for each mod, and one for each reason why something was left unchanged."""
    from loka.cli.output import print_line
    from loka.plan.mod_words import describe_gain_in, describe_mod, describe_unchanged

    if not plan.mods:
        return
    print_line("Mods:")
    for mod in plan.mods:
        gain = describe_gain_in(plan, mod)
        print_line(f"  {describe_mod(mod)}{f'; {gain}' if gain else ''}")
        left = describe_unchanged(mod.unchanged)
        for line in left[:_SHOWN]:
            print_line(f"    left {line}")
        rest = len(left) - _SHOWN
        if rest > 0:
            print_line(f"    and {rest} more reason{'s' if rest > 1 else ''}; --json has all of them")
