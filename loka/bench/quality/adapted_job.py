"""A training job of the model as a policy's mods make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from loka.bench.quality.training_job import TrainingJob
from loka.mods.adapt import adapt
from loka.mods.adaptation import Adaptation


def adapted_job(job: TrainingJob, adaptations: Sequence[Adaptation]) -> TrainingJob:
    """The job whose factory adapts what it builds; weights that stay are those of the same seed without mods."""
    if not adaptations:
        return job

    def factory() -> nn.Module:
        model = job.factory()
        adapt(model, adaptations)
        return model

    return replace(job, factory=factory)
