"""A third party's model for real: torchrec's DLRM_DCN, planned, generated, bound and trained, cross network included.

LowRankCrossNet calls F.linear on ParameterLists, which no exchange of nn.Linear modules reaches.
"""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch

from loka.codegen import render_package, write_package
from loka.numerics.metrics import sqnr
from loka.plan.planner import make_plan

pytest.importorskip("torchrec", reason="torchrec is an extra; `make test` installs it on Linux x86_64")

MODEL = '''
"""torchrec's DLRM-DCNv2, small: 7 tables of 32, a cross network of rank 64 over 256 features."""
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

NAMES = [f"f{i}" for i in range(7)]


def build():
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=32, num_embeddings=100, feature_names=[name])
        for name in NAMES
    ]
    return DLRM_DCN(
        EmbeddingBagCollection(tables=tables), dense_in_features=13, dense_arch_layer_sizes=[64, 32],
        over_arch_layer_sizes=[128, 64, 1], dcn_num_layers=3, dcn_low_rank_dim=64,
    )


def example_inputs(batch_size):
    lengths = torch.ones(len(NAMES) * batch_size, dtype=torch.int64)
    ids = torch.randint(0, 100, (len(NAMES) * batch_size,))
    return torch.randn(batch_size, 13), KeyedJaggedTensor(keys=NAMES, values=ids, lengths=lengths)
'''

POLICY = """
version: 1
name: dcn_of_torchrec
model: {factory: "model_of_torchrec:build", batch_size: 64}
defaults: {compute: fp8}
rules:
  - match: {max_n: 16}
    compute: keep
  - match: "*crossnet.W_kernels.*"
    fuse: always
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory):
    """The plan, the user's module and the generated package, in a folder of their own."""
    tmp_path = tmp_path_factory.mktemp("torchrec")
    monkeypatch = pytest.MonkeyPatch()
    (tmp_path / "model_of_torchrec.py").write_text(MODEL)
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan = make_plan(Path("policy.yaml"))
    write_package(render_package(plan), tmp_path / "generated_here" / "dcn_of_torchrec")
    yield plan, importlib.import_module("model_of_torchrec"), importlib.import_module("generated_here.dcn_of_torchrec")
    monkeypatch.undo()


@pytest.mark.slow
def test_the_cross_network_is_covered_and_trains(package) -> None:
    plan, user, generated = package
    cross = [site for site in plan.sites if "crossnet" in site.site.name]
    assert len(cross) == 6
    assert all(gemm.fp8 for site in cross for gemm in site.gemms)
    assert sum(site.site.share for site in cross) > 0.5
    assert plan.share_fp8 > 0.9
    assert plan.skipped == ()
    regions = {site.region for site in cross if ".W_kernels." in site.site.name}
    assert regions == {("linear", "mul", "add")}

    torch.manual_seed(0)
    model = user.build()
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    patch = generated.apply(model)
    assert list(model.state_dict()) == keys
    for batch in (64, 1, 3):
        inputs = user.example_inputs(batch)
        assert sqnr(model(*inputs).detach(), plain(*inputs).detach()) > 15

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, target = user.example_inputs(64), torch.randint(0, 2, (64, 1)).float()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(*inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    patch.verify()
    assert losses[-1] < 0.5 * losses[0]
    plain.load_state_dict(model.state_dict())
    patch.remove()
    assert torch.equal(model(*inputs), plain(*inputs))


def test_the_region_of_a_cross_layer_is_one_call(package) -> None:
    _, _, generated = package
    text = Path(generated.__file__).with_name("modules.py").read_text()
    assert len(re.findall(r"kernels\.linear_mul_add(_\d+)?\(", text)) == 3  # the frozen ones are called otherwise
