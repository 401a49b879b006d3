"""TorchRec's own DLRM_DCN under DistributedModelParallel, in two processes (gloo): its dense part in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import multiprocessing

import loka

pytest.importorskip("torchrec", reason="torchrec is an extra; `make test` installs it on Linux x86_64")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By when the model was bound: losses, bound sites and weights of each rank."""
    from tests.support.models import torchrec_dlrm as models
    from tests.support.processes import torchrec_workers as workers

    folder = tmp_path_factory.mktemp("torchrec")
    (folder / "dlrm_dcn.yaml").write_text(models.POLICY)
    loka.generate(folder / "dlrm_dcn.yaml", folder / "dlrm_dcn")
    found = {}
    for bind in ("never", "before", "after"):
        multiprocessing.spawn(workers.start, (str(folder), bind), nprocs=workers.WORLD)
        found[bind] = [torch.load(folder / f"{bind}.{rank}.pt") for rank in range(workers.WORLD)]
    return found


def test_the_bound_dense_part_learns_as_the_plain_one(trained):
    (plain, none, _), (bound, sites, _) = trained["never"][0], trained["before"][0]
    assert none is None
    assert len(sites) == 8, "two of the bottom, four of the crosses, two of the top; its last has one column"
    assert bound == pytest.approx(plain, abs=1e-3)
    assert bound != plain


def test_apply_before_and_after_sharding_are_the_same(trained):
    assert trained["before"][0][0] == trained["after"][0][0]


def test_all_ranks_have_the_same_dense_weights(trained):
    for bind, ranks in trained.items():
        one, other = (weights for _, _, weights in ranks)
        assert all(map(torch.equal, one, other)), bind
        assert ranks[0][0] != ranks[1][0], "ranks have batches of their own"
