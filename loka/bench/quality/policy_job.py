"""The training job that a policy describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError
from loka.policy.policy import Policy
from loka.sites.callables import current_directory_importable, find_callable


def job_of(policy: Policy, steps: int | None, device: str, tested: bool = True) -> TrainingJob:
    """The policy's job on `device`; `steps` None: as in the policy. Without `tested`, train.test may be missing.

    Raises InputError, with the place in the policy, if it has no train section or a callable cannot be found.
    """
    spec = policy.train
    if spec is None:
        held_out, instead = ', test: "package.module:name"', ""
        if not tested:
            held_out = ""
            instead = (
                ", or record a training loop of your own with loka.Probe (docs/probe.md), or, as weaker evidence, the "
                "model's example inputs: loka probe --synthetic"
            )
        raise InputError(
            f"{policy.where('')}: the policy has no train section; add "
            f'train: {{batches: "package.module:name", loss: "package.module:name"{held_out}}}, functions of '
            f"(batch_size, seed) and of (output, target){instead}"
        )
    if spec.test is None and tested:
        raise InputError(
            f"{policy.where('train')}: train.test is missing; name a function like batches, for rows that training "
            "does not see"
        )
    with current_directory_importable():
        factory = _find(policy, policy.model.factory, "model.factory")
        batches = _find(policy, spec.batches, "train.batches")
        loss = _find(policy, spec.loss, "train.loss")
        test = _find(policy, spec.test, "train.test") if tested and spec.test is not None else batches
    try:
        return TrainingJob(
            factory=factory,
            batches=batches,
            test_batches=test,
            loss=loss,
            batch_size=spec.batch_size,
            optimizer=spec.optimizer,
            learning_rate=spec.learning_rate,
            ema=spec.ema or 0.0,
            autocast=spec.autocast or False,
            steps=steps if steps is not None else spec.steps,
            shared_steps=spec.shared_steps if tested else 0,  # of a pair; without test rows none is trained
            device=device,
        )
    except InputError as error:  # numbers that are fine alone, and not together
        raise InputError(f"{policy.where('train')}: {error}") from error


def _find(policy: Policy, spec: str, field: str) -> Callable[..., Any]:
    try:
        return cast("Callable[..., Any]", find_callable(spec, field)[0])
    except InputError as error:
        raise InputError(f"{policy.where(field)}: {error}") from error
