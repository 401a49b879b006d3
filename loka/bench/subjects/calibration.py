"""Maxima for static scales: learned by a Probe in one training step of the benchmark's own work."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from loka.bench.speed.steps import StepWork, fresh_inputs, step_of
from loka.probe.probe import Probe
from loka.probe.profile.profile import Profile


def learned(work: StepWork, policy: Path) -> Profile:
    """The profile of one training step in bfloat16, on the device of `work`, without estimates.

    `policy` must name the model of `work`. Raises InputError otherwise.
    """
    model = copy.deepcopy(work.base).bfloat16().train()
    step = step_of(model, fresh_inputs(work, torch.bfloat16, training=True), training=True)
    with Probe(model, policy, every=1) as probe:
        step()
        probe.step()
        return probe.recorded().profile
