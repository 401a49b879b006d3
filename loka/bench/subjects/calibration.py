"""The maxima that known scales are made of: what a Probe learns in one training step of the work itself."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from loka.bench.speed.steps import StepWork, fresh_inputs, step_of
from loka.probe.probe import Probe
from loka.probe.profile.profile import Profile


def learned(work: StepWork, policy: Path) -> Profile:
    """The profile of one training step in bfloat16, on the device of `work`, without estimates.

    `policy` names the model that `work` has. Raises InputError where the model is another.
    """
    model = copy.deepcopy(work.base).bfloat16().train()
    step = step_of(model, fresh_inputs(work, torch.bfloat16, training=True), training=True)
    with Probe(model, policy, every=1) as probe:
        step()
        probe.step()
        return probe.recorded().profile
