"""Packages of policies, from the text to the import; and a training step of the ranker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.zoo import ranker_inputs
from tests.support.codegen.codegen_plans import import_package

Make = Callable[..., tuple[Plan, dict[str, str], ModuleType]]


@contextmanager
def policy_packages(folder: Path) -> Iterator[Make]:
    """Gives a function of a package's name and a policy's text: its plan, its files and the package.

    The policy is `policy.yaml` in the folder, which is the current one. Afterwards the packages are forgotten.
    """
    names: list[str] = []

    def one(name: str, policy: str) -> tuple[Plan, dict[str, str], ModuleType]:
        (folder / "policy.yaml").write_text(policy)
        plan = make_plan("policy.yaml")
        files = render_package(plan)
        names.append(name)
        return plan, files, import_package(files, folder, name)

    yield one
    for name in names:
        for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            sys.modules.pop(module)


def ranker_step(model: nn.Module) -> torch.Tensor:
    """The output of a training step of `loka.zoo:small_ranker` on a batch of 64, the same each time."""
    torch.manual_seed(3)
    inputs = ranker_inputs(64)
    y = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    model.zero_grad()
    y.float().square().mean().backward()
    found: torch.Tensor = y.detach()
    return found
