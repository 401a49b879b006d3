"""Training job of a model that a policy's mods have adapted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from loka.bench.quality.training_job import TrainingJob
from loka.mods.adapt import adapt
from loka.mods.adaptation import Adaptation


def adapted_job(job: TrainingJob, adaptations: Sequence[Adaptation]) -> TrainingJob:
    """The job with a factory that also adapts the model; weights the mods keep equal those of the seed without mods."""
    if not adaptations:
        return job

    def factory() -> nn.Module:
        model = job.factory()
        adapt(model, adaptations)
        return model

    return replace(job, factory=factory)
