"""Products with a Parameter of a matrix for each group, from the policy to training: a GEMM in FP8 for each matrix."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import loka
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Gemm
from loka.plan.examine import examine
from loka.plan.plan import Plan
from loka.probe.capture.live_sites import find_live
from loka.probe.gemm_errors import GemmErrors
from tests.support.codegen.policy_packages import Make
from tests.support.exact_numbers import check_exact_numbers
from tests.support.models.grouped_models import EINSUM, LOOP, SPELLINGS, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]
POLICY = (
    'version: 1\nname: grouped\nmodel: {{factory: "{module}:make", inputs: "{module}:example_inputs", '
    "batch_size: 64}}\n"
    "defaults: {{compute: {compute}, power_of_two: true, requantize_transpose: true, fuse: {fuse}}}\n"
)
MATRICES = {f"{name}.{group}" for name in "vw" for group in range(3)}


def in_fp8(plan: Plan) -> set[str]:
    return {each.site.name for each in plan.sites if each.fp8}


@pytest.mark.parametrize(("mlp", "is_chain"), [(LOOP, True), *SPELLINGS.values()], ids=["loop", *SPELLINGS])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_matrix_is_a_site_with_the_models_numbers(
    package: Make, tmp_path: Path, mlp: str, is_chain: bool, autocast: bool
) -> None:
    name = written(tmp_path, mlp)
    plan, files, generated = package(f"gen_{name}", POLICY.format(module=name, compute="fp8", fuse="always"))
    assert in_fp8(plan) == MATRICES | {"inner", "out"}
    module = importlib.import_module(name)
    assert files["modules.py"].count("w_0_to_v_0(") == (3 if is_chain else 0)
    own, bound = module.make(), module.make()
    with generated.apply(bound) as patch:
        check_exact_numbers(own, bound, module, autocast)
        patch.verify()


def test_gradients_of_the_matrices_are_stacked(package: Make, tmp_path: Path) -> None:
    name = written(tmp_path, EINSUM)
    _, files, generated = package(f"gen_{name}", POLICY.format(module=name, compute="fp8", fuse="always"))
    assert "w = self.w.unbind()\n" in files["modules.py"]
    model = importlib.import_module(name).make()
    with generated.apply(model):
        nodes, seen = [model(torch.randn(4, 8)).sum().grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [each for each, _ in node.next_functions]
    assert {"UnbindBackward0"} <= {type(each).__name__ for each in seen}
    assert not {"SelectBackward0", "IndexBackward0"} & {type(each).__name__ for each in seen}


def test_frozen_weights(package: Make, tmp_path: Path) -> None:
    name = written(tmp_path, EINSUM)
    _, _, generated = package(f"gen_{name}", POLICY.format(module=name, compute="fp8", fuse="always"))
    model, x = importlib.import_module(name).make().eval(), torch.randn(17, 8)
    with generated.apply(model), torch.no_grad():
        trained = model(x)
    with generated.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), trained)


@pytest.mark.parametrize(
    ("mlp", "sizes", "said"),
    [
        (
            EINSUM,
            (3, 127, 128),
            "3 GEMMs in one call (a grouped GEMM), of 127 x 128 each: LoKA splits it from 128",
        ),
        (EINSUM, (65, 128, 128), "65 GEMMs in one call (a grouped GEMM): LoKA splits it into up to 64"),
        (
            "y = torch.baddbmm(self.b.unsqueeze(1), x.transpose(0, 1), self.w); "
            "return (F.gelu(y) @ self.v + self.c).transpose(0, 1)",
            (3, 128, 128),
            "LoKA splits `x @ W`, bmm and einsum",
        ),
        (
            'y = F.gelu(torch.einsum("bti,tio->bto", x, self.w * 1.0) + self.b); '
            'return torch.einsum("bto,tod->btd", y, self.v) + self.c.squeeze(1)',
            (3, 128, 128),
            "its weight is computed from the Parameter 'w' by mul",
        ),
    ],
    ids=["small", "many", "baddbmm", "computed"],
)
def test_others_stay_together_and_say_why(
    package: Make, tmp_path: Path, mlp: str, sizes: tuple[int, int, int], said: str
) -> None:
    name = written(tmp_path, mlp, *sizes)
    plan, _, _ = package(f"gen_{name}", POLICY.format(module=name, compute="fp8", fuse="never"))
    assert "w.0" not in in_fp8(plan)
    assert any(said in (each.site.blocked or "") for each in plan.sites)


def test_what_is_kept_stays_as_the_model_has_it(package: Make, tmp_path: Path) -> None:
    name = written(tmp_path, EINSUM)
    policy = POLICY.format(module=name, compute="fp8", fuse="never") + "rules:\n  - {match: '[vw].*', compute: keep}\n"
    plan, files, _ = package(f"gen_{name}", policy)
    assert in_fp8(plan) == {"inner", "out"}
    assert "einsum" not in files["modules.py"]


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, Path]]:
    """The module and the policy of each spelling."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for spelling, mlp in (("loop", LOOP), *((each, mlp) for each, (mlp, _) in SPELLINGS.items())):
        name, path = written(tmp_path, mlp), tmp_path / f"{spelling}.yaml"
        path.write_text(POLICY.format(module=name, compute="fp8", fuse="never"))
        found[spelling] = name, path
    return found


def test_probing_sees_each_matrix(policies: dict[str, tuple[str, Path]]) -> None:
    stats = {}
    for spelling, (name, path) in policies.items():
        module = importlib.import_module(name)
        model = module.make()
        torch.manual_seed(1)
        with loka.Probe(model, path, every=1, rows=1000) as probe:
            model.drop.eval()
            model(*module.example_inputs(40)).square().sum().backward()
            probe.step()
            stats[spelling] = {each.name: each for each in probe.stats()}
    assert set(stats["loop"]) >= MATRICES
    for spelling, found in stats.items():
        for name in MATRICES:
            expected, got = stats["loop"][name], found[name]
            assert (got.k, got.n, got.input.rows, got.input.calls) == (expected.k, expected.n, 40, 1), spelling
            for operand in ("input", "grad_output"):
                want, have = getattr(expected, operand), getattr(got, operand)
                torch.testing.assert_close(have.column_amax, want.column_amax, rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(have.moments.mean, want.moments.mean, rtol=1e-3, atol=1e-5)


def test_the_error_of_one_matrix_is_added_to_its_group(policies: dict[str, tuple[str, Path]]) -> None:
    doubled = {Gemm.FPROP: lambda a, b: (a, 2 * b), Gemm.DGRAD: lambda a, b: (a, 2 * b)}
    results = {}
    for spelling, (name, path) in policies.items():
        module = importlib.import_module(name)
        model = module.make()
        torch.manual_seed(1)
        x = module.example_inputs(6)[0].requires_grad_()
        with GemmErrors(find_live(model, examine(load_policy(path)).sites), {"v.1": doubled}):
            y = model(x)
            y.square().sum().backward()
        results[spelling] = (y.detach(), x.grad, model.v.grad)
    for found in results.values():
        torch.testing.assert_close(found, results["loop"], rtol=1e-4, atol=1e-5)


def test_probing_ignores_other_products_with_the_parameter(policies: dict[str, tuple[str, Path]]) -> None:
    name, path = policies["einsum"]
    module = importlib.import_module(name)
    model = module.make()
    with loka.Probe(model, path, every=1, rows=1000) as probe:
        y = model(*module.example_inputs(40))
        torch.bmm(torch.randn(0, 4, 4), torch.randn(0, 4, 4))
        beside = torch.randn(5, 1, 4, 128) @ model.w  # the same rows for each group
        (y.square().sum() + beside.sum()).backward()
        probe.step()
        calls = {each.name: each.input.calls for each in probe.stats()}
    assert [calls[f"w.{group}"] for group in range(3)] == [1, 1, 1]
