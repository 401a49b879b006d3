"""M, K, N and FLOPs of GEMMs that models write in unusual ways, against torch's own count, with the true reasons."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from loka.graph.sites.discover import find_sites
from loka.graph.sites.forwards import forwards_of
from loka.graph.sites.merge_calls import flops_of, measure, total_flops
from loka.graph.sites.site import GemmKind, Site
from loka.model.build_model import BuiltModel
from tests.support.models import product_models as models

OPAQUE = "nn.MultiheadAttention computes its projections and scores in one opaque call"


def test_opaque_products_count_in_every_share() -> None:
    model = Recurrent(nn.GRU(12, 16, batch_first=True), 16)
    found = find_sites(BuiltModel(model, (torch.randn(6, 5, 12),), {}, 6))
    (gru,) = found.opaque
    flops = 2 * 6 * 5 * 3 * 16 * (12 + 16)
    assert (gru.what, gru.owners, gru.calls, gru.flops.at(6)) == ("gru", ("layer",), 1, flops)
    assert gru.share == gru.share_eval == pytest.approx(flops / (flops + 2 * 6 * 16))
    assert found["head"].share == pytest.approx(1 - gru.share)
    assert gru.share > 0.99


def found_in(model: nn.Module, x: Tensor) -> dict[str, Site]:
    return {site.name: site for site in find_sites(BuiltModel(model, (x,), {}, x.shape[0])).sites}


def sizes(site: Site, batch: int) -> tuple[int, int, int]:
    return site.rows.at(batch), site.k, site.n


def counted(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """FLOPs of a forward: those of all recorded calls, and torch's own count."""
    built = BuiltModel(model, (x,), {}, x.shape[0])
    forwards = forwards_of(built)
    calls, _ = measure(forwards.training.calls, forwards.samples, x.shape[0], forwards.from_data)
    others = flops_of(forwards.training.others, forwards.samples, x.shape[0], forwards.from_data).at(x.shape[0])
    with FlopCounterMode(display=False) as counter:
        model(x)
    return total_flops(calls) + others, counter.get_total_flops()


class Steps(nn.Module):
    """A recurrent cell, called for each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


CASES = [
    (Steps(nn.GRUCell(12, 16)), (6, 5, 12)),
    (Steps(nn.LSTMCell(12, 16)), (6, 5, 12)),
    (Steps(nn.RNNCell(12, 16)), (6, 5, 12)),
    (Recurrent(nn.GRU(12, 16, 2, batch_first=True, bidirectional=True), 32), (6, 5, 12)),
    (Recurrent(nn.LSTM(12, 16, batch_first=True, proj_size=8), 8), (6, 5, 12)),
    (Recurrent(nn.RNN(12, 16, batch_first=True), 16), (6, 5, 12)),
    (models.ExpertCross(), (6, 48)),
    (models.MatrixCross(), (6, 24)),
    (models.RowsOfMatrices(), (6, 32)),
    (models.TokenMixer(), (6, 4, 16)),
    (models.ColumnsOfTokens(), (6, 4, 16)),
    (models.CompressedInteraction(), (7, 6, 9)),
    (models.FieldAttention(), (6, 5, 16)),
]


@pytest.mark.parametrize(("model", "shape"), CASES, ids=lambda case: type(case).__name__)
def test_flops_are_those_that_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    ours, torchs = counted(model, torch.randn(shape))
    assert ours == torchs > 0


def test_columns_times_matrices_of_a_parameter_are_gemms_of_the_batch() -> None:
    found = found_in(models.ExpertCross(), torch.randn(6, 48))
    for layer in range(2):
        for expert in range(2):
            assert sizes(found[f"down.{layer}.{expert}"], 6) == (6, 48, 32)
            assert sizes(found[f"core.{layer}.{expert}"], 6) == (6, 32, 32)
            assert sizes(found[f"up.{layer}.{expert}"], 6) == (6, 32, 48)
    assert [site.name for site in found.values() if site.blocked] == ["#0"]  # the mixture of experts
    assert found["up.1.0"].weight == "up.1.0"
    assert found["up.1.0"].kind is GemmKind.MATMUL


def test_a_matrix_has_one_name_however_it_is_taken() -> None:
    found = found_in(models.RowsOfMatrices(), torch.randn(6, 32))
    assert list(found) == ["stacked.0", "stacked.3", "stacked.1", "stacked.2", "deep.0.1", "deep.1.0"]
    assert not any(site.blocked for site in found.values())


def group_of_four(weight: str, rows: int, columns: int) -> str:
    return (
        f"its weight '{weight}' has 3 dimensions: 4 GEMMs in one call (a grouped GEMM), of {rows} x {columns} each: "
        "LoKA splits it from 128 x 128 on"
    )


def test_grouped_gemms_are_native_with_their_sizes() -> None:
    found = found_in(models.TokenMixer(), torch.randn(6, 4, 16))
    assert sizes(found["up"], 6) == (24, 16, 32)
    assert found["up"].blocked == group_of_four("up", 16, 32)
    assert sizes(found["#0"], 6) == (24, 32, 16)
    assert found["#0"].blocked == group_of_four("down", 32, 16)
    columns = found_in(models.ColumnsOfTokens(), torch.randn(6, 4, 16))["#0"]
    assert sizes(columns, 6) == (24, 16, 24)
    assert columns.blocked == group_of_four("weight", 24, 16)


def test_products_of_activations_have_their_sizes_and_outer_products_are_no_gemms() -> None:
    found = found_in(models.Products(), torch.randn(6, 5, 16))
    assert {name: sizes(site, 6) for name, site in found.items()} == {
        "#0": (30, 16, 3),  # inner
        "#1": (30, 16, 1),  # field by field
        "#2": (30, 16, 5),  # the last product of three operands
        "out": (6, 16, 8),
    }
    assert {found[name].blocked for name in ("#0", "#1")} == {"both operands are computed: no Parameter takes part"}
    flops = 2 * 30 * 16 * 3 + 2 * 30 * 16 + (2 * 30 * 16 * 16 + 2 * 30 * 16 * 5) + 2 * 6 * 16 * 8
    assert found["#2"].share == pytest.approx((2 * 30 * 16 * 16 + 2 * 30 * 16 * 5) / flops)


class FoldedMatrices(nn.Module):
    """Parameters of three dimensions, each one matrix, and one that holds a matrix for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.experts = models.drawn(5, 16, 3), models.drawn(5, 16, 3), models.drawn(4, 3, 7)
        self.one, self.tokens = models.drawn(1, 3, 3), models.drawn(5, 16, 16)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 16)
        low = torch.einsum("bfd,fdr->br", x, self.down)
        many = torch.einsum("br,ers->bes", low, self.experts)
        low = torch.einsum("bei,eio->beo", low.unsqueeze(1), self.one).squeeze(1)
        x = torch.einsum("br,fdr->bfd", low, self.up) + torch.einsum("bfd,fde->bfe", x, self.tokens)
        return x + many.sum((1, 2))[:, None, None]


def test_parameters_of_three_dimensions_that_are_one_matrix_are_sites() -> None:
    found = found_in(FoldedMatrices(), torch.randn(6, 5, 16))
    assert {name: (sizes(site, 6), site.blocked) for name, site in found.items()} == {
        "down": ((6, 80, 3), None),
        "experts": ((6, 3, 28), None),
        "one": ((6, 3, 3), None),
        "up": ((6, 3, 80), None),
        "tokens": (
            (30, 16, 16),
            "its weight 'tokens' has 3 dimensions: 5 GEMMs in one call (a grouped GEMM), of 16 x 16 each: LoKA "
            "splits it from 128 x 128 on",
        ),
    }


def test_convolutions_of_size_one_are_gemms_and_wider_ones_are_noted() -> None:
    model = models.CompressedInteraction()
    built = BuiltModel(model, (torch.randn(7, 6, 9),), {}, 7)
    found = find_sites(built)
    assert {site.name: sizes(site, 7) for site in found.sites} == {
        "convs.0.weight": (63, 36, 8),
        "convs.1.weight": (63, 48, 10),
        "out": (7, 22, 1),
    }
    for name in ("convs.0", "convs.1"):
        site = found[f"{name}.weight"]
        assert (site.kind, site.owner, site.bias) == (GemmKind.CONVOLUTION, name, f"{name}.bias")
        assert site.blocked is None
    share = 100 * 15120 / (97076 + 15120)
    assert found.notes == (
        f"1 x conv1d: not replaced, and not among the sites: {share:.3g} % of the FLOPs of a forward",
    )


class Convolutions(nn.Module):
    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@pytest.mark.parametrize("kwargs", [{"groups": 2}, {"stride": 2}, {"padding": 1}])
def test_a_convolution_of_size_one_with_more_to_it_is_noted(kwargs: dict[str, object]) -> None:
    found = find_sites(BuiltModel(Convolutions(**kwargs), (torch.randn(5, 8, 4, 6),), {}, 5))
    assert not found.sites
    assert found.notes[0].startswith("1 x conv2d: not replaced, and not among the sites: 100 %")


class OnParameters(nn.Module):
    """A convolution by function, and a weight from the left that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = models.drawn(10, 8, 1)
        self.first, self.second = models.drawn(12, 6), models.drawn(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first @ self.second) @ F.conv1d(x, self.weight)


def test_a_convolution_of_images_is_found_and_stays() -> None:
    (site,) = find_sites(BuiltModel(Convolutions(), (torch.randn(5, 8, 4, 6),), {}, 5)).sites
    assert (site.name, sizes(site, 5)) == ("conv", (120, 8, 8))
    assert site.blocked is not None
    assert "write it as nn.Linear" in site.blocked


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.conv(x)


def test_a_convolution_that_is_called_twice_is_one_site() -> None:
    (site,) = find_sites(BuiltModel(CalledTwice(), (torch.randn(5, 8, 7),), {}, 5)).sites
    assert (site.name, site.calls) == ("conv.weight", 2)


def test_convolutions_by_function_and_computed_weights_from_the_left() -> None:
    found = found_in(OnParameters(), torch.randn(5, 8, 7))
    assert sizes(found["weight"], 5) == (35, 8, 10)
    product = next(site for site in found.values() if "computed from" in (site.blocked or ""))
    assert sizes(product, 5) == (35, 10, 12)


class Dots(nn.Module):
    """Tensordots over one dimension and over two, on a Parameter and on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = models.drawn(16, 12), models.drawn(5, 16, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 16)
        scores = torch.tensordot(x, x.mean(0), dims=([2], [1]))
        found = torch.tensordot(x, self.one, dims=([2], [0])).sum((1, 2)) + torch.tensordot(x, self.two).sum(1)
        return found + scores.sum((1, 2)) + torch.tensordot(x.mean((1, 2)), found, dims=0).sum()


def test_tensordots_have_their_sizes() -> None:
    found = found_in(Dots(), torch.randn(6, 5, 16))
    assert {name: (sizes(site, 6), site.blocked) for name, site in found.items()} == {
        "#0": ((30, 16, 5), "both operands are computed: no Parameter takes part"),
        "one": ((30, 16, 12), None),
        "#1": (
            (6, 80, 3),
            "torch.tensordot over several dimensions is not rewritten: write F.linear, @ or einsum",
        ),
    }


def test_attention_in_one_call_is_counted_and_named() -> None:
    found = found_in(models.FieldAttention(), torch.randn(6, 5, 16))
    for name in ("attentions.0", "attentions.1"):
        assert found[name].kind is GemmKind.ATTENTION
        assert found[name].blocked == OPAQUE
        assert found[name].share == pytest.approx(71040 / 143040)


class Forms(nn.Module):
    """Weights of each sample, rows of Parameters as biases, casts that change nothing, and a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.stacked = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(2, 16, 8))
        self.biases = nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.bmm(x, self.rank.unsqueeze(0).expand(x.size(0), -1, -1))
        y = F.linear(x, self.stacked[0], self.biases[0]).clamp(min=0)
        z = torch.clamp(x @ self.stacked[1].type_as(x).t() + self.biases[1], -1, 1)
        return mixed.mean() + y + z.clamp_min(0)


def test_weights_and_biases_in_other_forms() -> None:
    found = found_in(Forms(), torch.randn(6, 3, 8))
    assert set(found) == {"rank", "stacked.0", "stacked.1"}
    assert {name: site.blocked for name, site in found.items()} == dict.fromkeys(found)
    assert sizes(found["rank"], 6) == (18, 8, 4)
    assert found["stacked.0"].bias == "biases.0"
    assert found["stacked.0"].followed_by[0] == "relu"
    assert found["stacked.1"].followed_by[:3] == ("add", "clamp", "relu")
