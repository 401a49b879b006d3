"""Run by test_contributing.py in a process of its own, over a LoKA with the activation and with TRITON_INTERPRET=1.

Its kernels are compared with torch in Triton's interpreter; a model that calls it goes from a policy to a package that
is applied and verified.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import loka
from loka.codegen import render_package
from loka.kernels.fused import operators
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.interpreted.faster_interpreter import PROGRAMS, make_faster
from tests.support.interpreted.rendered_interpreted import near, results
from tests.support.kernels.rendered_cases import write_package

MODEL = """
import torch
from torch import nn


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = self.first(x)
        return nn.functional.softsign(self.second(y / (1.0 + y.abs())))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Body())
    model.example_inputs = lambda batch: (torch.randn(batch, 48),)
    return model
"""
POLICY = """
version: 1
name: softsigned
model: {factory: "softsigned_model:build", batch_size: 64}
defaults: {fuse: always, compute: keep}
"""


def compare_kernels(folder: Path) -> int:
    """Forward and backward in float32 against torch's function and its gradient; how many results were compared."""
    specs = NormForward(24, activation="softsign"), NormBackward(24, activation="softsign")
    package = write_package(folder / "softsign_interpreted", specs)
    x, grad = torch.randn(5, 24), torch.randn(5, 24)
    taken = x.double().requires_grad_()
    y = F.softsign(taken)
    (dx,) = torch.autograd.grad(y, taken, grad.double())
    compared = 0
    for run in (results, type(package).run):  # in the interpreter, and the reference
        assert near(run(package, specs[0], x)["out"].double(), y.detach())
        assert near(run(package, specs[1], grad, x)["dx"].double(), dx)
        compared += 2
    return compared


def check_package(folder: Path) -> None:
    """A policy's package calls its kernels, and computes what the model does."""
    (folder / "policy.yaml").write_text(POLICY)
    files = render_package(make_plan(str(folder / "policy.yaml")))
    assert files["kernels.py"].count('"add_softsign"') == 1, files["kernels.py"]
    package = plans.import_package(files, folder, "gen_softsigned")
    model = sys.modules["softsigned_model"].build()
    exact = copy.deepcopy(model).double()
    x, dy = torch.randn(20, 48), torch.randn(20, 32)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    for key, expected in chains.gradients(exact, x.double(), dy.double()).items():
        assert chains.error(found[key], expected) < 1e-5, key


def main(folder: Path) -> None:
    """All of it, in the copy of LoKA that is imported from; prints how many results of kernels were compared."""
    if folder not in Path(loka.__file__).parents:
        raise RuntimeError(f"loka was imported from {loka.__file__}, where the activation is not")
    (folder / "softsigned_model.py").write_text(MODEL)
    check_package(folder)
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS
    print(compare_kernels(folder))


if __name__ == "__main__":
    make_faster()
    main(Path.cwd())
