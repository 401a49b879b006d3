"""Dot interactions of a DLRM from the policy to training: found in any spelling, equal to the model, or left alone."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch

from loka.errors import InputError
from tests.support.codegen.policy_packages import Make
from tests.support.models.dlrm_models import FUSED, POLICY, D, N, gradients, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

OTHERS = {
    "another tensor": "torch.bmm(t, t.flip(1).transpose(1, 2))[:, self.i, self.j]",
    "of dimensions": "torch.bmm(t.transpose(1, 2), t)[:, :N, :N][:, self.i, self.j]",
    "scaled before": "torch.bmm(t, (t * 2.0).transpose(1, 2))[:, self.i, self.j]",
}
OPTIONAL = "{use: fuse_interaction, optional: true}"


@pytest.mark.parametrize("products", FUSED.values(), ids=FUSED)
def test_products_of_all_pairs_are_one_kernel_each_way(package: Make, tmp_path: Path, products: str) -> None:
    name = written(tmp_path, products)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    plan, files, generated = package(f"gen_{name}", policy)
    assert [each.what for each in plan.interactions] == [f"a dot interaction of {N} embeddings of {D}"]
    assert plan.interactions[0].sites == ("#0",)
    assert f'"""x (B, {N}, {D}) -> x @ x^T (B, {N}, {N})."""' in files["kernels.py"]
    assert "kernels.dlrm_dot_interaction(" in files["modules.py"]
    assert "transpose" not in files["modules.py"].partition("class ")[2]
    model = importlib.import_module(name).Dlrm()
    patched = copy.deepcopy(model)
    with generated.apply(patched) as patch:
        for batch in (33, 1):
            x = torch.randn(batch, 8)
            for right, got in zip(gradients(model, x), gradients(patched, x), strict=True):
                assert (got - right).norm() <= 1e-5 * right.norm()
        with torch.autocast("cpu", torch.bfloat16):
            assert patched(x).dtype == model(x).dtype
        assert torch.allclose(torch.compile(patched, fullgraph=True)(x), model(x), rtol=1e-4, atol=1e-4)
        patch.verify()


@pytest.mark.parametrize("products", OTHERS.values(), ids=OTHERS)
def test_other_products_are_left_alone(package: Make, tmp_path: Path, products: str) -> None:
    name = written(tmp_path, products)
    plan, files, _ = package(f"gen_{name}", POLICY.format(module=name, compute="keep", mods=OPTIONAL))
    assert plan.interactions == ()
    assert "dot_interaction" not in "".join(files.values())


def test_beside_fp8(package: Make, tmp_path: Path) -> None:
    name = written(tmp_path, FUSED["indices"])
    policy = POLICY.format(module=name, compute="fp8, scaling: rowwise", mods="{use: fuse_interaction}")
    _, files, generated = package(f"gen_{name}", policy)
    assert "kernels.dlrm_dot_interaction(" in files["modules.py"]
    _, _, alone = package(f"alone_{name}", policy.replace("{use: fuse_interaction}", ""))
    model, x = importlib.import_module(name).Dlrm(), torch.randn(33, 8)
    with alone.apply(model):
        expected = gradients(model, x)
    with generated.apply(model):
        for right, got in zip(expected, gradients(model, x), strict=True):
            assert (got - right).norm() <= 0.05 * right.norm()


def test_sizes_without_a_kernel_are_said(package: Make, tmp_path: Path) -> None:
    name = written(tmp_path, FUSED["indices"], n=130)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    with pytest.raises(
        InputError, match="no kernel multiplies all pairs of 130 embeddings of 16: a sample may have 128"
    ):
        package(f"gen_{name}", policy)
