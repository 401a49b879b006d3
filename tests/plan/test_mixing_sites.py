"""Which matmuls may be a mixing layer's, by their sizes: those are left to `fuse_interaction`, and no others."""

from __future__ import annotations

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.mods.rewriting.fuse_interaction import mixing_sites
from loka.mods.rewriting.fused_interactions import Interacting


def site(name: str, rows: int, k: int, n: int, owner: str = "layer", kind: GemmKind = GemmKind.MATMUL) -> Site:
    weight = None if kind is GemmKind.BMM else name
    return Site(name, kind, owner, weight, None, RowCount(rows), k, n, 1, 1, 0.1, True, (), (), "")


# 16 embeddings of 32, rank 8, 4 weighted sums.
MIXING = [site("rank", 32, 16, 8), site("layer#0", 16, 32, 8, kind=GemmKind.BMM), site("compress", 32, 16, 4)]
# Projections of 15 tokens of 64, and attention of two heads over them.
ATTENTION = [site(name, 15, 64, 64) for name in "qkv"] + [site("layer#0", 30, 32, 15, kind=GemmKind.BMM)]


def found(sites: list[Site]) -> set[str]:
    return set(mixing_sites(Interacting(frozenset({"layer"}), tuple(each for each in sites if each.weight)), sites))


def test_a_mixing_layer_with_its_weighted_sums() -> None:
    assert found(MIXING) == {"rank", "compress"}
    assert found(MIXING[:2]) == {"rank"}


def test_projections_beside_attention_are_none() -> None:
    assert found(ATTENTION) == set()
    assert found([*MIXING, *ATTENTION]) == {"rank", "compress"}


def test_a_product_of_another_module_makes_none() -> None:
    assert found([MIXING[0], site("other#0", 16, 32, 8, owner="other", kind=GemmKind.BMM)]) == set()
