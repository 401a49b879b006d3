"""TorchRec's own DLRM_DCN under DistributedModelParallel, in two processes (gloo): its dense part in FP8."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

import loka
from tests.support.processes.ranks import start_ranks

pytest.importorskip("torchrec", reason="torchrec is an extra; `make test` installs it on Linux x86_64")

pytestmark = pytest.mark.slow


EXCHANGED = """
extends: dlrm_dcn.yaml
name: exchanged
communication: {embeddings: {forward: fp16, backward: bf16}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By when the model was bound: losses, bound sites and weights of each rank."""
    from tests.support.models import torchrec_dlrm as models
    from tests.support.processes import torchrec_workers as workers

    folder = tmp_path_factory.mktemp("torchrec")
    (folder / "dlrm_dcn.yaml").write_text(models.POLICY)
    (folder / "exchanged.yaml").write_text(EXCHANGED)
    for name in ("dlrm_dcn", "exchanged"):
        loka.generate(folder / f"{name}.yaml", folder / name)
    saved = start_ranks(workers.start, workers.WORLD, folder)
    return {bind: [each[bind] for each in saved] for bind in workers.BINDS}


def test_the_bound_dense_part_learns_as_the_plain_one(trained):
    (plain, none, _), (bound, sites, _) = trained["never"][0], trained["before"][0]
    assert none is None
    assert len(sites) == 8, "two of the bottom, four of the crosses, two of the top; its last has one column"
    assert bound == pytest.approx(plain, abs=1e-3)
    assert bound != plain


def test_apply_before_and_after_sharding_are_the_same(trained):
    assert trained["before"][0][0] == trained["after"][0][0]


def test_exchanges_of_the_policy_are_those_of_float32_to_rounding(trained):
    exchanged, plain = trained["exchanged"][0][0], trained["before"][0][0]
    assert exchanged == pytest.approx(plain, abs=1e-3)
    assert exchanged != plain


def qcomms(exchange, folder, name):
    """The config that the package of a policy with these exchanges returns."""
    from tests.support.models import torchrec_dlrm as models

    (folder / f"{name}.yaml").write_text(f"{models.POLICY}communication: {{embeddings: {exchange}}}\n")
    loka.generate(folder / f"{name}.yaml", folder / name)
    return importlib.import_module(name).qcomms()


@pytest.mark.parametrize(
    ("exchange", "arguments"),
    [
        ("{forward: fp8, backward: fp8, row: 32}", ("FP8", "FP8", 32, 32)),
        ("{forward: fp8, backward: bf16, row: 50}", ("FP8", "BF16", 50, 50)),
        ("{forward: native, backward: fp8, row: 6}", ("FP32", "FP8", 6, 6)),
        ("{forward: bf16, backward: fp16}", ("BF16", "FP16", None, None)),
    ],
)
def test_the_config_of_a_policy(tmp_path, monkeypatch, caplog, exchange, arguments):
    from fbgemm_gpu.quantize_comm import QuantizationContext
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

    monkeypatch.syspath_prepend(tmp_path)
    name = "sent_" + re.sub(r"\W+", "_", exchange).strip("_")
    config = qcomms(exchange, tmp_path, name)
    forward, backward, row, row_back = arguments
    assert config == QCommsConfig(
        CommType[forward], CommType[backward], fp8_quantize_dim=row, fp8_quantize_dim_bwd=row_back
    )
    planned = loka.make_plan(loka.load_policy(tmp_path / f"{name}.yaml")).exchange
    codecs = get_qcomm_codecs(config)
    numbers = 32 * (row or row_back or 1)
    for codec, wire in ((codecs.forward, planned.forward), (codecs.backward, planned.backward)):
        context = QuantizationContext(row or row_back or 32)
        size = codec.calc_quantized_size(numbers, context) * codec.quantized_dtype.itemsize
        assert planned.bytes_each(wire) * numbers == pytest.approx(size)
    assert not caplog.records


def test_fbgemm_has_no_fp8_on_a_cpu(tmp_path, monkeypatch):
    """So exchanges in FP8 are run nowhere here; docs/frameworks.md says so."""
    from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs

    monkeypatch.syspath_prepend(tmp_path)
    codec = get_qcomm_codecs(qcomms("{forward: fp8, backward: bf16, row: 32}", tmp_path, "sent_on_a_cpu")).forward
    with pytest.raises(RuntimeError, match="not supported by CPU"):
        codec.encode(torch.randn(64, 32), codec.create_context())


def test_all_ranks_have_the_same_dense_weights(trained):
    for bind, ranks in trained.items():
        one, other = (weights for _, _, weights in ranks)
        assert all(map(torch.equal, one, other)), bind
        assert ranks[0][0] != ranks[1][0], "ranks have batches of their own"
