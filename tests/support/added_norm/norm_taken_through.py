"""Run by test_contributing.py in a process of its own, over a LoKA with the norm and with TRITON_INTERPRET=1.

Its kernels are compared with torch in Triton's interpreter; a model that calls the norm goes from a policy to a
package that is applied and verified.
"""

from __future__ import annotations

import copy
import sys
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import loka
from loka.codegen import render_package
from loka.kernels.fused import operators
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.interpreted.faster_interpreter import PROGRAMS, make_faster
from tests.support.interpreted.rendered_interpreted import near, results
from tests.support.kernels.poison import poisoned
from tests.support.kernels.rendered_cases import write_package

WIDTHS = (13, 512, 600, 16389)  # several rows at a step or one, with and without a mask, and rows in chunks
EPS = 1e-3
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        x = F.silu(F.normalize(self.first(F.normalize(x, dim=-1)), dim=-1))
        return F.normalize(self.second(x), p=2.0, dim=-1, eps=1e-6)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Body())
    model.example_inputs = lambda batch: (torch.randn(batch, 48),)
    return model
"""
POLICY = """
version: 1
name: normalized
model: {factory: "normalized_model:build", batch_size: 64}
defaults: {fuse: always, COMPUTE}
"""
KEPT = "compute: keep"
FP8 = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"


def activated(x: Tensor, activation: str | None) -> Tensor:
    """The norm of x by torch, and the activation."""
    y = F.normalize(x, dim=-1, eps=EPS)
    return F.silu(y) if activation == "silu" else x * torch.sigmoid(y) if activation == "gate_sigmoid" else y


def compare_kernels(folder: Path) -> int:
    """Forward and backward in float32 against torch's function and its gradient; how many results were compared."""
    cases = list(product(WIDTHS, (None, "silu", "gate_sigmoid"), (False, True)))
    forwards = [NormForward(w, "normalize", False, False, EPS, a, add, False, True) for w, a, add in cases]
    backwards = [NormBackward(w, "normalize", False, False, EPS, a, add, False) for w, a, add in cases]
    package = write_package(folder / "normalize_interpreted", [*forwards, *backwards])
    compared = 0
    for forward, backward in zip(forwards, backwards, strict=True):
        x, add, grad = torch.randn(5, forward.width), torch.randn(forward.width) / 8.0, torch.randn(5, forward.width)
        x[2] = EPS / forward.width / 2.0 - (add if forward.add else 0.0)  # shorter than eps
        taken = x.double().requires_grad_()
        expected = activated(taken + add if forward.add else taken, forward.activation)
        (dx,) = torch.autograd.grad(expected, taken, grad.double())
        vectors = [add] if forward.add else []
        for run in (results, type(package).run):  # in the interpreter, and the reference
            found = run(package, forward, x, *vectors)
            back = run(package, backward, grad, x, *vectors, found["rstd"])
            assert near(found["out"].double(), expected.detach()), forward
            assert near(back["dx"].double(), dx), backward
            compared += 2
    return compared


def check_package(folder: Path, compute: str, called: str) -> None:
    """A policy's package calls the norm's kernels, and computes what the model does in float64, FP8 simulated."""
    (folder / "policy.yaml").write_text(POLICY.replace("COMPUTE", compute))
    files = render_package(make_plan(str(folder / "policy.yaml")))
    assert f'"{called}"' in files["kernels.py"], files["kernels.py"]
    package = plans.import_package(files, folder, f"gen_{called}")
    model = sys.modules["normalized_model"].build()
    exact = chains.simulated(model) if compute == FP8 else copy.deepcopy(model).double()
    x, dy = torch.randn(20, 48), torch.randn(20, 32)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        assert model(x[:0]).shape == (0, 32)  # by torch's own functions
    for key, expected in chains.gradients(exact, x.double(), dy.double()).items():
        # Values that lie between two of e4m3 may be rounded either way: few of them.
        assert chains.error(found[key], expected) < (5e-3 if compute == FP8 else 1e-5), (compute, key)


def main(folder: Path) -> None:
    """All of it, in the copy of LoKA that is imported from; prints how many results of kernels were compared."""
    if folder not in Path(loka.__file__).parents:
        raise RuntimeError(f"loka was imported from {loka.__file__}, where the norm is not")
    (folder / "normalized_model.py").write_text(MODEL)
    check_package(folder, KEPT, "add_normalize_silu_eps_1e_12")
    check_package(folder, FP8, "add_normalize_silu_e4m3_eps_1e_12")
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS
    operators.row_parts = lambda x, rows, across, per_multiprocessor: PROGRAMS
    Tensor.new_empty = poisoned(Tensor.new_empty)
    print(compare_kernels(folder))


if __name__ == "__main__":
    make_faster()
    main(Path.cwd())
