"""torchrec's DLRM_DCN, whose cross network calls F.linear on Parameters of lists."""

from __future__ import annotations

import pytest
import torch

from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import GemmKind, RowCount
from loka.model.build_model import BuiltModel
from loka.model.large_tensors import LargeToMeta

pytest.importorskip("torchrec", reason="torchrec is an extra")

TABLES, WIDTH, BATCH = 26, 128, 48


@pytest.fixture(scope="module")
def built():
    from torchrec.models.dlrm import DLRM_DCN
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    with LargeToMeta(1 << 20) as large:
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=WIDTH, num_embeddings=40_000_000, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
        bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        model = DLRM_DCN(
            bags,
            dense_in_features=13,
            dense_arch_layer_sizes=[512, 256, WIDTH],
            over_arch_layer_sizes=[1024, 1024, 512, 256, 1],
            dcn_num_layers=3,
            dcn_low_rank_dim=512,
        )
    assert large.sent >= TABLES
    lengths = torch.randint(0, 3, (TABLES * BATCH,))
    values = torch.randint(0, 1000, (int(lengths.sum()),))
    jagged = KeyedJaggedTensor(keys=[f"f{i}" for i in range(TABLES)], values=values, lengths=lengths)
    return BuiltModel(model, (torch.randn(BATCH, 13), jagged), {}, BATCH)


@pytest.mark.slow
def test_the_cross_network_is_two_thirds_of_the_flops(built):
    found = find_sites(built)
    cross = [site for site in found.sites if site.owner == "inter_arch.crossnet"]
    assert {site.name.rpartition(".")[0] for site in cross} == {
        "inter_arch.crossnet.W_kernels",
        "inter_arch.crossnet.V_kernels",
    }
    assert len(cross) == 6
    assert {(site.kind, site.blocked, site.rows) for site in cross} == {(GemmKind.FUNCTIONAL_LINEAR, None, RowCount(1))}
    assert {(site.k, site.n) for site in cross} == {(3456, 512), (512, 3456)}
    assert sum(site.share for site in cross) == pytest.approx(0.66, abs=0.01)
    assert sum(site.share for site in found.sites) == pytest.approx(1)
    assert all(site.where.startswith("crossnet.py:") for site in cross)


@pytest.mark.slow
def test_every_other_gemm_is_a_plain_linear(built):
    sites = find_sites(built).sites
    linears = [site for site in sites if site.kind is GemmKind.LINEAR]
    assert len(linears) == len(sites) - 6 == 8
    assert all(site.rows == RowCount(1) and site.calls == site.calls_eval == 1 for site in sites)
    assert [site.k for site in linears if not site.input_grad] == [13]
