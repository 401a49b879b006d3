"""The heads of a model: which parts of its output are logits, and which parts of the target their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from loka.bench.quality.training_calls import TEST, TrainingCallError, form_of

Head = str | int  # a key, an attribute, a place in a tuple or list, or a column of a Tensor
ONLY = ""  # the name of the head of a model whose output is one logit


def by_head(output: Any, target: Any, heads: Sequence[Head]) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and labels of each head, by its name, in the model's shapes. Without `heads` there is ONLY one.

    Raises TrainingCallError unless each head has one logit and one label, 0 or 1, for each sample.
    """
    if not heads:
        return {ONLY: _checked("", output, target)}
    return {
        str(head): _checked(f"head {head}: ", _part_of(output, head, "output"), _part_of(target, head, "target"))
        for head in heads
    }


def _part_of(value: Any, head: Head, what: str) -> Any:
    """The part of an output or target that a head names. Raises TrainingCallError if there is none."""
    try:
        if isinstance(value, Mapping):
            return value[head]
        if isinstance(head, int):
            return value[:, head] if isinstance(value, Tensor) else value[head]
        if not isinstance(value, Tensor):  # whose attributes are no heads
            return getattr(value, head)
    except (LookupError, AttributeError, TypeError):
        pass
    raise TrainingCallError(
        TEST,
        f"train.heads names {head!r}, and the {what} has no such head: it is {form_of(value)}; name a key, an "
        "attribute, a place in a tuple, or a column",
    )


def _checked(head: str, output: Any, target: Any) -> tuple[Tensor, Tensor]:
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.numel() == target.numel():
        if not are_labels(target):
            raise TrainingCallError(
                TEST,
                f"{head}its labels must be 0 (no click) and 1 (click) alone, of which NE and AUC are; leave a head "
                "that predicts another quantity out of train: {heads: [...]}: it is trained, and not judged",
            )
        return output, target
    dicts = isinstance(output, Mapping) and isinstance(target, Mapping)
    heads = ", ".join(str(key) for key in output if key in target) if dicts else "..."
    raise TrainingCallError(
        TEST,
        f"{head}in evaluation mode the model must return one logit for each sample, (R,) or (R, 1), and the test "
        f"batches one label, not {form_of(output)} for a target of {form_of(target)}: name the heads of a model that "
        f"has several, train: {{heads: [{heads}]}}, or return the one to compare where "
        "self.training is False, and yield its label alone",
    )


def are_labels(target: Tensor) -> bool:
    """True if a target holds 0 and 1 alone; waits for its device."""
    return bool(((target == 0) | (target == 1)).all())
