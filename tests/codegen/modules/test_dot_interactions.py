"""Dot interactions of a DLRM from the policy to training: found in any spelling, equal to the model, or left alone."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from tests.support.codegen.policy_packages import Make
from tests.support.gpu import ON_HOPPER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

N, D = 9, 16
MODEL = """\
import torch
from torch import nn

N, D = {n}, {d}


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        i, j = torch.tril_indices(N, N, -1)
        for name, value in (("i", i), ("j", j), ("flat", i * N + j), ("mask", torch.ones(N, N).tril(-1).bool())):
            self.register_buffer(name, value)
        self.emb = nn.Linear(8, N * D)
        self.top = nn.Linear({pairs} + D, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        t = self.emb(x).view(-1, N, D)
        p = {products}
        return self.out(torch.relu(self.top(torch.cat([t[:, 0], p.flatten(1)], 1)))).squeeze(-1)


def inputs(batch):
    return (torch.randn(batch, 8),)
"""
FUSED = {
    "indices": "torch.bmm(t, torch.transpose(t, 1, 2))[:, self.i, self.j]",
    "matmul": "(t @ t.mT).flatten(1)[:, self.flat]",
    "einsum": 'torch.einsum("bnd,bmd->bnm", t, t)[:, self.i, self.j]',
    "select": "torch.index_select(torch.matmul(t, t.permute(0, 2, 1)).reshape(-1, N * N), 1, self.flat)",
    "mask": "torch.masked_select(torch.bmm(t, t.transpose(1, 2)), self.mask).view(t.shape[0], -1)",
    "contiguous": "(torch.bmm(t, t.transpose(-1, -2).contiguous()) * 0.5)[:, self.i, self.j]",
}
OTHERS = {
    "another tensor": "torch.bmm(t, t.flip(1).transpose(1, 2))[:, self.i, self.j]",
    "of dimensions": "torch.bmm(t.transpose(1, 2), t)[:, :N, :N][:, self.i, self.j]",
    "scaled before": "torch.bmm(t, (t * 2.0).transpose(1, 2))[:, self.i, self.j]",
}
POLICY = (
    'version: 1\nname: dlrm\nmodel: {{factory: "{module}:Dlrm", inputs: "{module}:inputs", batch_size: 32}}\n'
    "defaults: {{compute: {compute}, fuse: always}}\nmods: [{mods}]\n"
)
OPTIONAL = "{use: fuse_interaction, optional: true}"


def written(folder: Path, products: str, n: int = N, d: int = D) -> str:
    """The name of a module with a model whose pairs are `products`."""
    name = f"dlrm_{abs(hash((products, n, d)))}"
    (folder / f"{name}.py").write_text(MODEL.format(n=n, d=d, pairs=n * (n - 1) // 2, products=products))
    return name


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("products", FUSED.values(), ids=FUSED)
def test_products_of_all_pairs_are_one_kernel_each_way(package: Make, tmp_path: Path, products: str) -> None:
    name = written(tmp_path, products)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    plan, files, generated = package(f"gen_{name}", policy)
    assert [each.what for each in plan.interactions] == [f"a dot interaction of {N} embeddings of {D}"]
    assert plan.interactions[0].takes == ("#0",)
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


@pytest.mark.parametrize(
    ("n", "said"), [(130, "130 embeddings of 16: a sample may have 128"), (16, "16 embeddings of 16: no GPU has run")]
)
def test_sizes_without_a_kernel_are_said(package: Make, tmp_path: Path, n: int, said: str) -> None:
    name = written(tmp_path, FUSED["indices"], n=n)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    with pytest.raises(InputError, match=f"no kernel multiplies all pairs of {said}"):
        package(f"gen_{name}", policy)


@pytest.mark.parametrize("mark", [pytest.param("gpu", marks=ON_HOPPER)])
@pytest.mark.usefixtures("fresh_compiler")
def test_on_a_gpu_as_near_to_float64_as_the_model_is(package: Make, tmp_path: Path, mark: str) -> None:
    name = written(tmp_path, FUSED["indices"], 27, 128)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    _, _, generated = package(f"gen_{name}", policy)
    model = importlib.import_module(name).Dlrm().cuda()
    for batch in (1031, 1):
        x = torch.randn(batch, 8, device="cuda")
        exact = gradients(copy.deepcopy(model).double(), x.double())
        with torch.autocast("cuda", torch.bfloat16):
            plain = gradients(model, x)
            with generated.apply(model):
                found, compiled = gradients(model, x), gradients(torch.compile(model, fullgraph=True), x)
        for right, theirs, *ours in zip(exact, plain, found, compiled, strict=True):
            bound = 1.2 * (theirs - right).norm() + 1e-3 * right.norm()
            assert all((each - right).norm() <= bound for each in ours)
