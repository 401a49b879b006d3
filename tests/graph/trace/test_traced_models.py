"""Straight-line forwards of what recommenders are made of: Wukong, nn.Sequential, torchrec's DLRM_DCN."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import source, with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.patterns.region import find_regions
from loka.graph.trace.examples import Examples, ModelInputs, capture_examples
from loka.graph.trace.trace import copy_owner, trace_forward
from tests.support.as_written import as_written
from tests.support.models import ir_models as zoo

WUKONG_LAYER = """\
def forward(self, x):
    if self.n != 8 or self.d != 16:
        raise dispatch.InputError('other arguments')
    transpose = x.transpose(1, 2)
    matmul = torch.matmul(transpose, self.rank)
    matmul_1 = torch.matmul(x, matmul)
    flatten = matmul_1.flatten(1)
    fmb_norm = torch.nn.functional.layer_norm({layer_norm_0})
    fmb_0 = torch.nn.functional.linear(fmb_norm, self.fmb[0].weight, self.fmb[0].bias)
    fmb_1 = torch.nn.functional.layer_norm({layer_norm_1})
    fmb_2 = torch.nn.functional.silu(fmb_1, inplace=False)
    fmb_3 = self.fmb[3](fmb_2)
    view = fmb_3.view(-1, 4, 16)
    matmul_2 = torch.matmul(self.compress, x)
    cat = torch.cat([view, matmul_2], 1)
    add = cat + x
    out_norm = self.out_norm(add)
    return out_norm
"""


def canonical(model: nn.Module, owner: str, inline: tuple[str, ...], sites: tuple[str, ...], *shape: int) -> ForwardIR:
    batches = {batch: ModelInputs((torch.randn(batch, *shape),)) for batch in (4, 7)}
    captured = capture_examples(model, [owner], batches)
    answer = trace_forward(model.get_submodule(owner), owner, captured[owner], inline, sites)
    assert isinstance(answer, ForwardIR), answer
    return answer


def traced(model: nn.Module, owner: str, inline: tuple[str, ...], sites: tuple[str, ...], *shape: int) -> ForwardIR:
    """The forward as it is written."""
    batches = {batch: ModelInputs((torch.randn(batch, *shape),)) for batch in (4, 7)}
    captured = capture_examples(model, [owner], batches)
    return as_written(model.get_submodule(owner), owner, captured[owner], inline, sites)


def same(original: nn.Module, bound: nn.Module, *shape: int) -> None:
    for batch in (1, 3, 16):
        x = torch.randn(batch, *shape, requires_grad=True)
        y = torch.clone(x.detach()).requires_grad_()
        a, b = original(x), bound(y)
        assert torch.equal(a, b)
        (a.square().sum() + b.square().sum()).backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_a_wukong_layer_reads_like_its_forward() -> None:
    model = zoo.Wukong()
    forward = traced(model, "layers.1", ("fmb_norm", "fmb.1", "fmb.2"), ("rank", "compress", "fmb.0"), 8, 16)
    norms = {
        f"layer_norm_{i}": next(s.text() for s in forward.statements if s.target == target).partition("(")[2][:-1]
        for i, target in enumerate(("fmb_norm", "fmb_1"))
    }
    assert source(forward) == WUKONG_LAYER.format(**norms)
    assert all(part in norms["layer_norm_1"] for part in ("fmb_0, (32,)", "self.fmb[1].weight", "1e-05"))
    assert forward.inlined == ("fmb_norm", "fmb", "fmb.0", "fmb.1", "fmb.2")
    assert (forward.owner, forward.owner_type) == ("layers.1", f"{zoo.Layer.__module__}.Layer")
    called = canonical(model, "layers.1", ("fmb_norm", "fmb.1", "fmb.2"), ("rank", "compress", "fmb.0"), 8, 16)
    (region,) = find_regions(called, {"fmb.0"})
    assert region.ops == ("layer_norm", "linear", "layer_norm", "silu")  # from the layer into its nn.Sequential


def test_a_bound_wukong_layer_is_the_same_module() -> None:
    model = zoo.Wukong()
    forward = traced(model, "layers.0", ("fmb_norm", "fmb.1", "fmb.2"), ("rank", "compress", "fmb.0"), 8, 16)
    bound = copy.deepcopy(model)
    for layer in bound.layers:
        with_forward(layer, forward)  # one text for all layers of one kind
    same(model, bound, 8, 16)
    assert list(bound.state_dict()) == list(model.state_dict())


def test_layers_of_one_kind_have_one_text() -> None:
    model = zoo.Wukong()
    a, b = (traced(model, f"layers.{i}", (), ("rank", "compress"), 8, 16) for i in (0, 1))
    assert (a.statements, a.fingerprint, a.arguments) == (b.statements, b.fingerprint, b.arguments)


def test_a_bound_layer_compiles_whole_and_survives_checkpointing() -> None:
    model = zoo.Wukong(1)
    forward = traced(model, "layers.0", ("fmb_norm", "fmb.1", "fmb.2"), ("rank", "compress", "fmb.0"), 8, 16)
    bound, x = with_forward(copy.deepcopy(model.layers[0]), forward), torch.randn(3, 8, 16)
    compiled = torch.compile(bound, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model.layers[0](x))
    checkpointed = torch.utils.checkpoint.checkpoint(bound, x.clone().requires_grad_(), use_reentrant=False)
    checkpointed.sum().backward()
    model.layers[0](x).sum().backward()
    for a, b in zip(bound.parameters(), model.layers[0].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_an_mlp_in_a_sequential() -> None:
    mlp = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())
    parts = (("1", "2", "4", "5"), ("0", "3"))
    forward = canonical(mlp, "", *parts, 8)
    assert [region.ops for region in find_regions(forward, {"0", "3"})] == [
        ("linear", "layer_norm", "silu"),
        ("linear", "layer_norm", "relu"),
    ]
    same(mlp, with_forward(copy.deepcopy(mlp), traced(mlp, "", *parts, 8)), 8)


class TestTorchrec:
    """The dense part of torchrec's DLRM_DCN."""

    def test_the_cross_network_is_covered(self) -> None:
        crossnet = pytest.importorskip("torchrec.modules.crossnet", reason="torchrec is an extra").LowRankCrossNet(
            16, 3, 4
        )
        sites = tuple(f"{kind}_kernels.{i}" for i in range(3) for kind in "VW")
        forward = canonical(crossnet, "", (), sites, 16)
        assert tuple(s.call.site for s in forward.statements if s.call) == sites
        regions = find_regions(forward, set(sites))
        assert [region.ops for region in regions] == [("linear",), ("linear", "mul", "add")] * 3  # with its bias
        same(crossnet, with_forward(copy.deepcopy(crossnet), traced(crossnet, "", (), sites, 16)), 16)

    def test_perceptrons_are_inlined_into_the_over_arch(self) -> None:
        over = pytest.importorskip("torchrec.models.dlrm", reason="torchrec is an extra").OverArch(16, [8, 4, 1])
        sites = ("model.0._mlp.0._linear", "model.0._mlp.1._linear")
        forward = canonical(over, "", (), sites, 16)
        assert [region.ops for region in find_regions(forward, set(sites))] == [("linear", "relu")] * 2
        same(over, with_forward(copy.deepcopy(over), traced(over, "", (), sites, 16)), 16)

    def test_a_whole_dlrm_dcn_with_a_table_that_was_built_without_storage(self) -> None:
        dlrm = pytest.importorskip("torchrec.models.dlrm", reason="torchrec is an extra")
        import torchrec
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        tables = [
            torchrec.EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=2**31, feature_names=["f"]),
            torchrec.EmbeddingBagConfig(name="u", embedding_dim=8, num_embeddings=9, feature_names=["g"]),
        ]
        collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        model = dlrm.DLRM_DCN(collection, 5, [16, 8], [8, 1], 2, 4)

        def inputs(batch: int) -> ModelInputs:
            ids = KeyedJaggedTensor.from_lengths_sync(
                keys=["f", "g"], values=torch.arange(2 * batch) % 9, lengths=torch.ones(2 * batch, dtype=torch.int32)
            )
            return ModelInputs((torch.randn(batch, 5), ids))

        owners = ("inter_arch.crossnet", "")
        captured = capture_examples(model, owners, {batch: inputs(batch) for batch in (4, 7)})
        crossnet = model.inter_arch.crossnet
        answer = trace_forward(crossnet, owners[0], captured[owners[0]], (), ("V_kernels.0", "W_kernels.1"))
        assert isinstance(answer, ForwardIR), answer
        whole = trace_forward(model, "", captured[""], (), ())
        assert isinstance(whole, Refused)
        assert "was built without storage (64.0 GiB)" in whole.reason
        assert all(parameter.is_meta for parameter in collection.parameters())


class Stats(nn.Module):
    """A model that draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.twice = zoo.Plain()

    def forward(self, x: Tensor, *, flag: bool = True) -> Tensor:
        return self.twice(self.twice(self.inner(x))[:2])


def test_capturing_leaves_the_model_and_the_random_state_alone() -> None:
    model = Stats()
    batches = {batch: ModelInputs((torch.randn(batch, 8),), {"flag": False}) for batch in (4, 7)}
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    captured = capture_examples(model, ["twice", "", "inner.1"], batches)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    twice, whole = captured["twice"], captured[""]
    assert isinstance(twice, Examples)
    assert isinstance(whole, Examples)
    assert [(call.batch, call.args[0].shape[0]) for call in twice.calls] == [(4, 4), (4, 2), (7, 7), (7, 2)]
    assert whole.calls[0].kwargs == {"flag": False}


def test_a_module_that_is_not_called_has_no_examples() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    inputs = {batch: ModelInputs((torch.randn(batch, 3, 8),) * 3) for batch in (4, 7)}
    captured = capture_examples(model, ["out_proj"], inputs)
    assert captured["out_proj"] == Refused("out_proj", "the model does not call it at batch 4", called=False)


def test_a_buffer_without_storage_stops_the_capture() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_buffer("huge", torch.empty(2**30, 2, device="meta"))
    captured = capture_examples(model, ["0"], {4: ModelInputs((torch.randn(4, 8),))})
    assert isinstance(captured["0"], Refused)
    assert "its inputs cannot be captured: 'huge' was built without storage (8.0 GiB)" in captured["0"].reason


class Wide(nn.Module):
    """One Parameter beside hundreds of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.w = zoo.weight()
        self.tower = nn.Sequential(*[nn.Linear(8, 8) for _ in range(400)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.tower(x @ self.w))


@pytest.mark.slow
def test_children_that_nothing_changes_are_not_copied() -> None:
    module = Wide()
    copied = copy_owner(module, frozenset())
    assert copied.tower is module.tower
    assert copied.norm is not module.norm  # it has buffers
    assert copied.w is not module.w
    inlined = copy_owner(module, frozenset({"tower", "tower.3"}))
    assert inlined.tower is not module.tower
    assert inlined.tower[3] is not module.tower[3]
    assert inlined.tower[4] is module.tower[4]
    forward = canonical(module, "", (), ("w",), 8)
    assert [s.op for s in forward.statements] == ["linear", "module", "batch_norm"]
    assert all(child.training for child in module.modules())


class FillsACache(nn.Module):
    """Its first call makes what all others read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(8.0)  # type: ignore[assignment]
        return self.linear(x) * self.positions


def test_what_a_first_call_fills_is_there_when_the_forward_is_read() -> None:
    model = FillsACache()
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (4, 7)}
    found = trace_forward(model, "", capture_examples(model, [""], batches)[""], ("linear",), ("linear",))
    assert isinstance(found, ForwardIR), found
