"""What `loka.fp8` says: what is gained, or why nothing is, by which evidence, and how to keep it."""

from __future__ import annotations

from loka.devices.targets import DEFAULT, spec_of
from loka.plan.plan import NATIVE
from loka.plan.planner import Planned
from loka.plan.view.table import NOTHING, RECIPES, group_sites
from loka.plan.view.verdict import verdict

REASONS = 8  # most rows of sites that are told, each with its reason


def report_of(found: Planned, policy: str, bound: bool, mode: str, with_loss: bool, chosen: bool) -> str:
    """The report, the verdict first, the policy's text last. `chosen`: the target is the machine's, not the user's."""
    plan = found.plan
    lines = [f"{verdict(plan)}."]
    if found.prospect is not None:
        lines.append(f"{found.prospect.describe(plan.batch_size)}.")
    rows = [row.cells for row in group_sites(plan, alike=True)]
    native = [cells for cells in rows if all(cells[gemm] in (NATIVE, NOTHING) for gemm in RECIPES)]
    if native:
        lines.append(f"Not in FP8, and why ({plan.name}.yaml is the policy below):")
        lines += [f"  {cells['site']}: {cells['reason']}" for cells in native[:REASONS]]
        lines += [f"  and {len(native) - REASONS} more rows of sites"] if len(native) > REASONS else []
    elif not rows:
        lines.append("The model has no product that could be in FP8.")
    if bound:
        lines.append(f"The model is bound, mode={mode!r}; patch.remove() undoes it.")
    else:
        lines.append("Nothing is to be gained, so nothing is bound.")
    if chosen and spec_of(plan.target).is_reference:
        lines.append(
            "The model is on no GPU that LoKA knows, so the plan is for the reference path, which emulates FP8 slowly "
            f'and exactly, and no times decide; target="{DEFAULT.name}" predicts those of the {DEFAULT.title}.'
        )
    keeping = _keeping(plan.name, mode) if bound else ("The policy that was planned (patch.policy):",)
    lines += [_evidence(mode, with_loss, plan.batch_size), "", *keeping, "", policy.rstrip()]
    return "\n".join(lines)


def _evidence(mode: str, with_loss: bool, samples: int) -> str:
    if mode == "infer":
        return (
            f"The evidence is one forward of {samples} samples, and times are those of a forward. Judge the quality on "
            "test data."
        )
    if with_loss:
        return f"The evidence is one forward and backward of {samples} samples: enough to try out, not to train."
    return (
        f"The evidence is one forward of {samples} samples; without a loss, gradients are those of labels drawn at "
        "random. This is no evidence for training: give loss=, a function of what the model returns."
    )


def _keeping(name: str, mode: str) -> tuple[str, ...]:
    path, full = f"policies/{name}.yaml", f"{name}.full.safetensors"
    head = (
        "The package is gone when this process ends. To keep it, write the policy below (patch.policy)",
        f"to {path}, and name in it your functions, which return the model and inputs for a batch size.",
    )
    if mode == "train":
        return (
            *head,
            "Its `train` section names your batches and loss: evidence for training. Then:",
            f"    loka probe {path}",
            f"    loka generate {path}",
        )
    return (
        *head,
        "The model that your function returns is to be frozen (requires_grad_(False)), as this plan is of",
        "forwards alone. Record calls of yours:",
        f'    with loka.Probe(model.eval(), "{path}", every=1, path="{full}") as probe:',
        "        model(...)",
        "        probe.step()",
        "Then:",
        f"    loka probe {path} --from {full}",
        f"    loka generate {path}",
    )
