"""`loka explain`: everything about one site, and the rule behind each of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Cached, Json, PolicyPath, percent, print_json, print_line, print_table
from loka.cli.progress import announce_plan

if TYPE_CHECKING:
    from loka.plan.report.explain_site import Explanation

NAME = "explain"


def command(
    policy: PolicyPath,
    site: Annotated[str, typer.Argument(metavar="SITE", help="A site's name, as `loka plan` prints it.")],
    cached: Cached = True,
    as_json: Json = False,
) -> None:
    """Explain one site: what it is, what runs and why, the rule that set each field, and its profile."""
    announce_plan(policy)
    from loka.plan.plan_cache import PlanCache
    from loka.plan.planner import planned
    from loka.plan.report.explain_site import explain

    made = planned(policy, cache=PlanCache.default(cached))
    explanation = explain(made.plan, site, made.known)
    if as_json:
        print_json(explanation)
    else:
        show(explanation)


def show(site: Explanation) -> None:
    """Print the site, its GEMMs and its fields."""
    print_line(f"{site.site}: {site.kind}, M {site.m} ({site.rows}), K {site.k}, N {site.n}")
    for label, text in _facts(site):
        print_line(f"  {label}: {text}")
    print()
    print_table(
        ("GEMM", "runs in", "kernel", "reason"),
        [(each.gemm.value, each.runs_in, each.kernel, each.reason) for each in site.gemms],
    )
    if site.inside is not None:
        from loka.cli.tables.time_lines import show_inside

        show_inside(site.inside)
    if site.timing is not None:
        from loka.cli.tables.time_lines import show_kernels, show_timing

        show_timing(site.timing)
        show_kernels(site.gemms)
    else:
        _show_rejected(site)
    if site.evidence is not None:
        from loka.cli.tables.profile_lines import show_profile_view

        print()
        show_profile_view(site.evidence)
    if site.fields:
        print()
        print_table(
            ("field", "value", "set by", "overrode"),
            [
                (
                    field.path,
                    field.holds.value,
                    str(field.holds),
                    "; ".join(f"{each.value} of {each}" for each in field.overrode),
                )
                for field in site.fields
            ],
        )
    notes = [(field.holds.source, field.holds.note) for field in site.fields]
    for source, text in dict.fromkeys(notes + [(each.mod, each.note) for each in site.mods]):
        if text:
            print_line(f"{source}: {text}")


def _show_rejected(site: Explanation) -> None:
    rejected = [(each.gemm.value, kernel, reason) for each in site.gemms for kernel, reason in each.rejected]
    if rejected:
        print()
        print_table(("GEMM", "rejected", "because"), rejected)


def _facts(site: Explanation) -> list[tuple[str, str]]:
    from loka.plan.plan import NOTHING_AROUND

    ends = site.region_ends
    calls, members = f"{site.calls} in training, {site.calls_eval} in evaluation", ", ".join(site.members)
    facts = [
        ("share", f"{percent(site.share)} of the model's GEMM FLOPs, {site.flops:.3g} FLOPs in a training step"),
        ("calls", calls),
        ("owner", site.owner or "the model itself"),
        ("weight", site.weight or (f"those of {members}" if members else "computed, no Parameter")),
        ("bias", site.bias or (f"those of {members}" if members else "none")),
        ("fed by", ", ".join(site.fed_by) or "the model's input"),
        ("followed by", ", ".join(site.followed_by) or "the model's output"),
    ]
    optional = (
        ("written at", site.where),
        ("cannot be patched", site.blocked or ""),
        ("region", " -> ".join(site.region) or ("the GEMM alone" if ends else "")),
        (
            "region ends" if site.region else "region not replaced",
            "" if ends and site.region_note == NOTHING_AROUND else site.region_note,
        ),
        *(("region ends at", text) for text in ends),
        ("generated class", site.bound_in),
        ("not timed", site.untimed),
    )
    numbered = [(each.mod.partition(": "), each) for each in site.mods]  # "mod 2: block_norm"
    mods = [(number, f"{use} ({each.place}): {each.what}") for (number, _, use), each in numbered]
    return facts + [(label, text) for label, text in optional if text] + mods
