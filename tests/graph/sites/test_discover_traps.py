"""The thirteen things that break a search for nn.Linear modules: each is found as it is, or blocked with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.graph.sites.site import GemmKind, RowCount
from loka.model.build_model import build_model
from tests.support.models import trap_models as models


def by_name(found):
    return {site.name: site for site in found.sites}


def test_products_with_parameters_are_found(find):
    sites = by_name(find(models.Parameters(), torch.randn(6, 32)))
    shapes = {name: (site.kind, site.k, site.n) for name, site in sites.items()}
    assert shapes == {
        "linear": (GemmKind.FUNCTIONAL_LINEAR, 32, 24),
        "right": (GemmKind.MATMUL, 24, 40),
        "transposed": (GemmKind.MATMUL, 40, 48),
        "addmm": (GemmKind.ADDMM, 48, 20),
        "einsum": (GemmKind.EINSUM, 20, 36),
        **{f"layers.{i}": (GemmKind.FUNCTIONAL_LINEAR, 36, 36) for i in range(3)},
    }
    assert all(site.rows == RowCount(1) and site.blocked is None for site in sites.values())
    assert sites["addmm"].bias == "addmm_bias"
    assert sites["right"].where.startswith("trap_models.py:")
    assert sites["right"].followed_by[:2] == ("silu", "matmul")
    assert sum(site.share for site in sites.values()) == pytest.approx(1)


def test_a_parameter_on_the_left(find):
    site = by_name(find(models.Compress(), torch.randn(5, 16, 12)))["compress"]
    assert (site.kind, site.rows, site.k, site.n) == (GemmKind.MATMUL, RowCount(12), 16, 8)
    assert site.blocked is None


def test_batched_and_generated_weights_are_blocked_with_their_share(find):
    found = find(models.Batched(), torch.randn(5, 16))
    blocked = [site for site in found.sites if site.blocked]
    reasons = [site.blocked for site in blocked]
    assert len(blocked) == 4
    assert "both operands are computed: no Parameter takes part" in reasons
    assert any(reason.startswith("its weight 'experts' has 3 dimensions: 4 GEMMs in one call") for reason in reasons)
    assert by_name(found)["table.0"].blocked is None  # a slice, which is a matrix of its own
    assert "its weight is computed from the buffer 'fixed', which is no Parameter" in reasons
    assert all(site.share > 0 for site in blocked)
    assert sum(site.share for site in found.sites) == pytest.approx(1)
    flops = 5 * 2 * (16 * 128 + 4 * 16 * 4 + 4 * 16 * 8 + 4 * 16 * 8 + 16 * 8 + 16 * 8)
    assert sum(site.calls * site.flops_per_row * site.rows.at(5) for site in found.sites) == flops


def test_attention_is_one_call_and_its_projection_never_called(find):
    found = find(models.Attention(), torch.randn(5, 7, 32))
    sites = by_name(found)
    assert sites["attn"].kind is GemmKind.ATTENTION
    assert "opaque" in sites["attn"].blocked
    flops = 2 * 7 * (4 * 32 * 32 + 2 * 7 * 32)
    assert sites["attn"].share == pytest.approx(flops / (flops + 64))
    assert sites["attn"].flops_per_row * sites["attn"].rows.at(1) == flops
    assert (sites["attn.out_proj"].calls, sites["attn.out_proj"].share) == (0, 0)
    assert "never called" in sites["attn.out_proj"].blocked


def test_an_encoder_layer_bypasses_its_linears_in_evaluation(find):
    found = find(models.Encoder(), torch.randn(5, 7, 32))
    sites = by_name(found)
    assert [(sites[f"layer.linear{i}"].calls, sites[f"layer.linear{i}"].calls_eval) for i in (1, 2)] == [(1, 0), (1, 0)]
    assert any("'layer'" in note and "training alone" in note for note in found.notes)


def test_the_encoder_layer_really_bypasses_them():
    model = models.Encoder().eval()
    calls = []
    model.layer.linear1.register_forward_hook(lambda *_: calls.append(1))
    # A hook is one of torch's reasons not to fuse, so the call is watched from within instead.
    model.layer.linear1._forward_hooks.clear()
    forward = model.layer.linear1.forward
    model.layer.linear1.forward = lambda x: calls.append(1) or forward(x)
    with torch.no_grad():
        model(torch.randn(5, 7, 32))
    assert calls == []
    model(torch.randn(5, 7, 32))
    assert calls == [1]


def test_odd_widths_names_and_modules_called_twice(find):
    found = find(models.Ranker(), torch.randn(6, 13), torch.randint(0, 100, (17,)), torch.arange(0, 12, 2))
    sites = by_name(found)
    assert list(sites) == ["dense", "shared", "towers.a-b", "towers.1", "towers.class", "pad"]
    assert (sites["dense"].k, sites["towers.a-b"].k, sites["towers.1"].n) == (13, 479, 1)
    assert (sites["shared"].calls, sites["shared"].calls_eval) == (2, 2)
    assert sites["shared"].bias is None
    assert all(site.rows == RowCount(1) for site in found.sites)
    assert sites["dense"].input_grad is False
    assert sites["shared"].input_grad is True
    assert sites["towers.a-b"].fed_by == ("gelu", "linear")
    assert sites["dense"].followed_by[:2] == ("batch_norm", "add")


def test_embedding_bags_are_left_alone(find):
    found = find(models.Ranker(), torch.randn(6, 13), torch.randint(0, 100, (17,)), torch.arange(0, 12, 2))
    assert not [site for site in found.sites if site.name.startswith("bag")]


def test_three_dimensional_transposed_and_strided_inputs(find):
    sites = by_name(find(models.Shapes(), torch.randn(5, 6, 10)))
    rows = {name: (site.rows, site.k, site.n) for name, site in sites.items()}
    assert rows == {
        "inner": (RowCount(6), 10, 16),
        "across": (RowCount(16), 6, 4),
        "some": (RowCount(8), 4, 8),
        "flat": (RowCount(1), 64, 8),
    }


def test_one_parameter_at_two_places_is_numbered_and_in_a_loop_counted(find):
    sites = by_name(find(models.OneWeightTwice(), torch.randn(5, 16)))
    assert [(name, site.weight, site.calls) for name, site in sites.items()] == [
        ("#0", "weight", 1),
        ("#1", "weight", 1),
        ("loop", "loop", 3),
    ]


def test_a_lazy_module_is_run_once(tmp_path, monkeypatch):
    text = "import torch\nfrom torch import nn\ndef build():\n"
    text += "    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))\n"
    (tmp_path / "lazy_factory.py").write_text(text + "def example_inputs(b):\n    return torch.randn(b, 24)\n")
    monkeypatch.chdir(tmp_path)
    from loka.graph.sites.discover import find_sites

    found = find_sites(build_model("lazy_factory:build", None, 4))
    assert [(site.name, site.k, site.n, site.kind) for site in found.sites] == [
        ("0", 24, 8, GemmKind.LINEAR),
        ("2", 8, 2, GemmKind.LINEAR),
    ]


def test_autocast(find):
    sites = by_name(find(models.Casts(), torch.randn(5, 16)))
    assert {(name, site.kind, site.blocked) for name, site in sites.items()} == {
        ("first", GemmKind.LINEAR, None),
        ("second", GemmKind.LINEAR, None),
    }
    assert sites["second"].fed_by == ("relu", "layer_norm", "linear")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_need_input_gradients(find, reentrant):
    sites = by_name(find(models.Checkpointed(reentrant), torch.randn(5, 8)))
    assert {name: site.input_grad for name, site in sites.items()} == {
        "first": False,
        "block.0": True,
        "block.2": True,
    }


def test_a_compiled_submodule_is_looked_into(find):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1] = torch.compile(model[1], backend="eager")
    sites = by_name(find(model, torch.randn(5, 8)))
    assert set(sites) == {"0", "1._orig_mod"}


def test_linears_that_are_not_quite_plain(find):
    sites = by_name(find(models.Net(), torch.randn(5, 16)))
    assert (sites["own.weight"].kind, sites["own.weight"].owner, sites["own.weight"].blocked) == (
        GemmKind.FUNCTIONAL_LINEAR,
        "own",
        None,
    )
    assert sites["subclass.weight"].kind is GemmKind.FUNCTIONAL_LINEAR
    assert (sites["hooked"].kind, sites["hooked"].blocked) == (GemmKind.LINEAR, None)
    assert (sites["head"].kind, sites["head"].weight) == (GemmKind.LINEAR, "head.weight")
    assert "its weight is computed" in sites["normed#0"].blocked
    assert len(sites) == 5
