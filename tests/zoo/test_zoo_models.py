"""Shapes, sizes and traceability of the reference models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn

from loka import zoo
from loka.zoo.dlrm import DLRM, DCNSizes, DCNv2
from loka.zoo.wukong import LARGE, SMALL, Wukong, WukongLayer, WukongRanker, WukongSizes, mlp
from tests.support.codegen.policy_packages import policy_packages
from tests.support.exact_numbers import check_exact_numbers
from tests.support.models import tiny_families

RANKERS = {
    "ranker": (zoo.ranker, zoo.ranker_inputs),
    "small_ranker": (zoo.small_ranker, zoo.ranker_inputs),
    "movietweetings": (zoo.movietweetings_ranker, zoo.movietweetings_inputs),
    "dlrm": (zoo.dlrm, zoo.dlrm_inputs),
    "movietweetings_dlrm": (zoo.movietweetings_dlrm, zoo.movietweetings_inputs),
}
DENSE_PARTS = {
    "wukong_small": (zoo.wukong_small, zoo.wukong_small_inputs, (64, 128)),
    "wukong_large": (zoo.wukong_large, zoo.wukong_large_inputs, (128, 256)),
    "dcnv2": (zoo.dcnv2, zoo.dcnv2_inputs, (27, 128)),
}
# Of each family: logits of a sample, and the share of GEMM FLOPs in FP8 of the tiny model: of all that have weights.
FAMILIES = {
    "mmoe": (zoo.mmoe, zoo.mmoe_inputs, 2, 0.97),
    "ple": (zoo.ple, zoo.ple_inputs, 2, 0.97),
    "rankmixer": (zoo.rankmixer, zoo.rankmixer_inputs, 1, 1.0),
    "hstu": (zoo.hstu, zoo.hstu_inputs, 1, 0.93),
    "interformer": (zoo.interformer, zoo.interformer_inputs, 1, 0.83),
    "onetrans": (zoo.onetrans, zoo.onetrans_inputs, 1, 0.94),
    "masknet": (zoo.masknet, zoo.masknet_inputs, 1, 1.0),
    "autoint": (zoo.autoint, zoo.autoint_inputs, 1, 0.84),
    "final_mlp": (zoo.final_mlp, zoo.final_mlp_inputs, 1, 0.99),
    "din": (zoo.din, zoo.din_inputs, 1, 0.99),
    "dhen": (zoo.dhen, zoo.dhen_inputs, 1, 0.97),
}
FP8 = "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}"


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_a_production_width_and_take_any_batch(name: str) -> None:
    factory, inputs, logits, _ = FAMILIES[name]
    with torch.device("meta"):
        model = factory().eval()
    assert 1e6 < sum(each.numel() for each in model.parameters()) < 200e6
    for batch in (0, 3):
        assert model(*(each.to("meta") for each in inputs(batch))).shape == (batch, logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU
@pytest.mark.parametrize("name", [*FAMILIES, "masknet_serial"])
def test_a_family_in_fp8_that_rounds_nothing_has_the_models_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = f"{tiny_families.__name__}:{name}"
    model = f'{{factory: "{tiny}", inputs: "{tiny}_inputs", batch_size: 64}}'
    with policy_packages(tmp_path) as package:
        plan, _, generated = package(f"gen_zoo_{name}", f"version: 1\nname: p\nmodel: {model}\ndefaults: {FP8}\n")
        assert plan.share_fp8 >= FAMILIES[name.removesuffix("_serial")][3]
        own = getattr(tiny_families, name)()
        bound = copy.deepcopy(own)
        inputs = cast(ModuleType, SimpleNamespace(example_inputs=getattr(tiny_families, f"{name}_inputs")))
        patch = generated.apply(bound)
        check_exact_numbers(own, bound, inputs)
        patch.verify()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", RANKERS)
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_rankers_give_one_logit_for_each_sample(name: str, batch: int) -> None:
    factory, inputs = RANKERS[name]
    logits = factory()(*inputs(batch))
    assert logits.shape == (batch,)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("name", RANKERS)
def test_every_parameter_of_a_ranker_gets_a_gradient(name: str) -> None:
    factory, inputs = RANKERS[name]
    model = factory()
    zoo.click_loss(model(*inputs(64)), torch.randint(2, (64,)).float()).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert without == []


@pytest.mark.parametrize("name", RANKERS)
def test_a_factory_draws_from_torchs_generator_and_seeds_nothing(name: str) -> None:
    factory, inputs = RANKERS[name]
    torch.manual_seed(5)
    first = factory().state_dict()
    after = torch.rand(1)
    inputs(4)
    torch.manual_seed(5)
    second = factory().state_dict()
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(value, second[key]) for key, value in factory().state_dict().items())


@pytest.mark.parametrize("name", DENSE_PARTS)
def test_dense_parts_have_the_measured_sizes(name: str) -> None:
    factory, inputs, shape = DENSE_PARTS[name]
    (x,) = inputs(2)
    assert x.shape == (2, *shape)
    with torch.device("meta"):
        assert factory()(x.to("meta")).shape == (2, 1)


def linear_shapes(factory: Callable[[], nn.Module]) -> list[tuple[int, int]]:
    with torch.device("meta"):
        model = factory()
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def test_wukong_small_and_large_match_the_baselines() -> None:
    layer = [(64 * 32, 2048), (2048, 2048), (2048, 32 * 128)]
    assert linear_shapes(zoo.wukong_small) == layer * 4 + [(64 * 128, 2048), (2048, 2048), (2048, 2048), (2048, 1)]
    layer = [(128 * 64, 4096), (4096, 4096), (4096, 64 * 256)]
    assert linear_shapes(zoo.wukong_large) == layer * 4 + [(128 * 256, 4096), (4096, 4096), (4096, 4096), (4096, 1)]
    assert (SMALL.layers, SMALL.rank, LARGE.layers, LARGE.rank) == (4, 32, 4, 64)


def test_dcnv2_matches_the_baseline() -> None:
    cross = [(3456, 512), (512, 3456)]
    over = [(3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert linear_shapes(zoo.dcnv2) == cross * 3 + over


def test_a_wukong_layer_is_the_factorisation_machine_of_the_paper() -> None:
    torch.manual_seed(0)
    sizes = WukongSizes(embeddings=6, dim=4, layers=1, rank=3, hidden=8)
    layer = WukongLayer(sizes)
    x = torch.randn(5, 6, 4)
    pairwise = torch.stack([sample @ sample.T for sample in x])  # all inner products of two embeddings
    flat = nn.functional.layer_norm((pairwise @ layer.rank).reshape(5, 18), (18,))
    made = layer.fmb(flat).reshape(5, 3, 4)
    weighted = torch.stack([layer.compress @ sample for sample in x])
    expected = nn.functional.layer_norm(torch.cat([made, weighted], 1) + x, (4,))
    torch.testing.assert_close(layer(x), expected)


def test_an_mlp_is_a_sequential_of_linear_norm_and_silu() -> None:
    kinds = [type(part).__name__ for part in mlp(4, 8, 2)]
    assert kinds == ["Linear", "LayerNorm", "SiLU", "Linear", "LayerNorm", "SiLU", "Linear"]


def test_a_cross_network_multiplies_by_its_input() -> None:
    torch.manual_seed(0)
    model = DCNv2(DCNSizes(embeddings=3, dim=2, layers=2, rank=4, over=(5,)))
    x0 = x = torch.randn(7, 6)
    for layer in model.cross:
        dense = layer.up.weight @ layer.down.weight
        x = x0 * (x @ dense.T + layer.up.bias) + x
    torch.testing.assert_close(model(x0.view(7, 3, 2)), model.over(x))


@pytest.mark.parametrize("name", RANKERS)
def test_rankers_trace_and_the_trace_serves_other_batch_sizes(name: str) -> None:
    factory, inputs = RANKERS[name]
    model = factory()
    traced = fx.symbolic_trace(model)
    for batch in (2, 5):
        torch.testing.assert_close(traced(*inputs(batch)), model(*inputs(batch)))


def test_most_gemms_of_the_ranker_have_sizes_that_fp8_takes() -> None:
    shapes = linear_shapes(zoo.small_ranker)
    flops = sum(k * n for k, n in shapes)
    fit = sum(k * n for k, n in shapes if k % 16 == 0 and n % 16 == 0)
    assert fit / flops > 0.95
    assert shapes[-1][1] == 1
    assert shapes[0][0] == 13


@pytest.mark.parametrize(
    "build",
    [
        lambda: WukongRanker(WukongSizes(4, 8, 1, 2, 8), rows=(5, 5), dense=2),
        lambda: DLRM(DCNSizes(4, 8, 1, 2, (8,)), rows=(5, 5), dense=2),
    ],
)
def test_tables_and_sizes_must_agree(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="2 tables and the dense features make 3 embeddings"):
        build()


def test_click_loss_is_the_mean_binary_cross_entropy() -> None:
    logits, target = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0])
    p = torch.sigmoid(logits)
    expected = -(p[0].log() + (1 - p[1]).log()) / 2
    torch.testing.assert_close(zoo.click_loss(logits, target), expected)
    torch.testing.assert_close(zoo.click_loss(logits[:, None], target), expected)
    assert zoo.click_loss(logits.bfloat16(), target).dtype == torch.float32


def test_the_dense_model_keeps_no_row_dependence_between_samples() -> None:
    torch.manual_seed(0)
    model = Wukong(WukongSizes(4, 8, 2, 2, 16)).eval()
    x: Tensor = torch.randn(6, 4, 8)
    torch.testing.assert_close(model(x)[2:4], model(x[2:4]))
