"""FSDP2's all-gathers of FP8 weights, in four processes on the CPU (gloo): in pairs, in three, and in a 2 x 2 mesh."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import loka
from loka.dispatch.shard.gathered_weight import GatheredWeight
from loka.errors import InputError
from loka.kernels.chain_values import with_gathered
from tests.support.models import sharded_models as models
from tests.support.processes import gather_workers as workers
from tests.support.processes.checkpoint_workers import assert_loaded
from tests.support.processes.ranks import results_of, start_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Generated packages, by which every process binds."""
    folder = tmp_path_factory.mktemp("gathers")
    for name, factory, rules in models.PACKAGES:
        (folder / f"{name}.yaml").write_text(models.POLICY.format(name=name, factory=factory, rules=rules))
        loka.generate(folder / f"{name}.yaml", folder / name)
    return folder


@pytest.fixture(scope="module")
def saved(folder):
    """What each process got from every function of gather_workers; starting them takes longest."""
    return start_ranks(workers.start, workers.WORLD, folder, workers.NAMES)


@pytest.fixture
def run(saved):
    """The results of one function, by rank."""
    return partial(results_of, saved)


@pytest.mark.slow
def test_gathers_move_fp8_and_results_are_those_of_the_whole_weights(run):
    for nbytes, report, (now, before), same, apart in run("gathers"):
        assert now / (before / 2) <= 0.53  # of bfloat16; these weights are float32
        assert nbytes[False] - nbytes[True] == before - now
        assert nbytes[True] < 0.27 * nbytes[False]
        assert report.splitlines()[0] == "FP8 all-gather: 4 of 4 FP8 weights"
        assert same == [True, True]
        assert apart == [[], []]


@pytest.mark.slow
def test_a_unit_quantizes_its_weights_in_one_launch_for_forward_and_backward(run):
    assert run("launched") == [([2, 0, 2, 0], 4)] * 2  # two units


@pytest.mark.slow
def test_ways_of_sharding_change_no_bit(run):
    for found in run("kinds"):
        report = found.pop("report")
        assert not any(found.values())
        assert len(found) == 7
        assert "FP8 all-gather: 2 of 4 FP8 weights" in report
        assert "gathered as they are: blocks.1.up, blocks.1.down: its recipe reads more than one FP8 copy" in report


@pytest.mark.slow
def test_loops_change_no_bit(run):
    for found in run("loops"):
        assert found == {"accumulated": [], "checkpointed": [], "evaluated": [], "empty": []}


@pytest.mark.slow
def test_compiled_models_change_no_bit_and_are_whole_graphs(run):
    for found in run("compiled"):
        assert found == {"whole": ([], 0), "units": ([], 0)}


@pytest.mark.slow
def test_uneven_parts(run):
    *found, idle = run("uneven")
    assert [parts for _, parts, _ in found] == [[70, 43], [70, 43], [68, 42]]
    for apart, _, (now, before) in found:
        assert apart == []
        assert now / (before / 2) <= 0.53
    assert idle == []


@pytest.mark.slow
def test_a_mesh_of_two_dimensions(run):
    assert run("hybrid") == [([], 4)] * workers.WORLD


@pytest.mark.slow
def test_units_of_the_policy_inside_of_a_module(run):
    for apart, report, before, after in run("units"):
        assert apart == []
        assert "FP8 all-gather: 4 of 4 FP8 weights" in report
        advice = "is an FSDP unit of its own: shard the module around it instead, or write units: "
        assert f"'blocks.0': its child 'up' {advice}[\"*.up\"] in the policy and run loka generate again" in before
        assert f"'blocks.0': its child 'up' {advice}[\"*.up\"] in the policy" in after[0]
        assert "shard the module around it instead, or name it under `units` in the policy" in after[1]


@pytest.mark.slow
def test_tied_weights(run):
    for apart, report in run("tied"):
        assert apart == []
        assert "FP8 all-gather: 2 of 3 FP8 weights" in report
        assert "gathered as they are: out: it is tied to a parameter that is read in another way" in report


@pytest.mark.slow
def test_padded_columns_and_a_parameter_of_two_products(run):
    for apart, report, (now, before) in run("odd"):
        assert apart == []
        assert now == 128 * (128 + 4)
        assert before == 128 * 120 * 4
        assert "gathered as they are: both: its recipe reads more than one FP8 copy" in report


@pytest.mark.slow
def test_gathers_are_as_the_policy_has_them(run):
    for apart, report, nothing, wide, other in run("asked"):
        assert apart == []
        assert "FP8 all-gather: 1 of 4 FP8 weights" in report
        assert "blocks.0.up, blocks.0.down: the plan has it gathered so (carry: bf16)" in report
        assert "blocks.1.up: the plan has it gathered so (carry: native)" in report
        assert "FP8 all-gather: 0 of 4 FP8 weights" in nothing  # so that nothing of FSDP's ways is refused
        assert "blocks.0.up.weight: the policy has it gathered in bf16, and FSDP gathers torch.float32: give" in wide
        assert "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or write carry" in wide
        assert "call gather_fp8 of the patch of the whole model" in other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not sharded", "no parameter of this model is sharded: fully_shard first, then gather_fp8"),
        ("late", "call gather_fp8 after fully_shard and before the first forward"),
        ("number", "give fully_shard reshard_after_forward=True or False"),
        ("infer", "every rank has the FP8 weights: there is nothing to gather"),
        ("keep", "'blocks.0.up', 'blocks.0.down': the weight is gathered in FP8 (gather_fp8)"),
        ("guard", "which `keep` and guards run, needs it in the model's dtype"),
        ("own forward", "reads a weight that FSDP has gathered in FP8"),
        ("offloaded", "it is offloaded to the CPU, which FSDP's hooks do not support"),
        ("alone", "blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down: one rank has all of it"),
        ("partly", "blocks.1.up, blocks.1.down: it is not sharded by fully_shard"),
        ("columns", "it is not split along its rows"),
        ("meta", "the weight is on the meta device: give it values (to_empty), then gather_fp8"),
    ],
)
def test_what_is_refused(run, case, words):
    for messages in run("refused"):
        assert words in messages[case]


@pytest.mark.slow
def test_a_resumed_job_is_the_one_that_was_not_interrupted(run):
    for found in run("resumed"):
        for kind, (apart, losses, guards, trained, report) in found.items():
            assert apart == [], kind
            assert losses
            assert guards
            assert trained > 60
            assert kind != "gathered in FP8" or "FP8 all-gather: 2 of 8 FP8 weights" in report


@pytest.mark.slow
def test_checkpoints_of_four_ranks_load_on_two_and_on_one(run):
    for found in run("loaded"):
        assert_loaded(found)


@pytest.mark.slow
def test_moved_and_assigned_weights(run):
    for message in run("moved"):
        assert "blocks.0.up, blocks.0.down: the model was moved or cast after gather_fp8" in message


@pytest.mark.slow
def test_every_rank_is_told_which_rank_has_bound_something_else(run):
    for messages, (one, other) in run("different"):
        train, infer = f"generation {one} in mode train", f"generation {one} in mode infer"
        head, *lines = messages["package"].splitlines()
        assert "ranks that train together have bound different things: give all of them" in head
        assert [line.strip(" -") for line in lines] == [
            f"ranks 0, 2, 3: {train}",
            f"rank 1: generation {other} in mode train",
        ]
        lines = [line.strip(" -") for line in messages["mode and sites"].splitlines()[1:]]
        kept = "without 'blocks.1.up', 'blocks.1.down'"
        assert lines == [f"ranks 0, 1: {train}", f"rank 2: {train}, {kept}", f"rank 3: {infer}"]
        assert f"rank 0: generation {other} in mode train" in messages["guard"]


@pytest.mark.slow
def test_a_probe_sees_the_same_of_gathered_weights(run):
    for names, same, calls in run("probed"):
        assert names == ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "head"]
        assert list(same.values()) == [True] * 15, same
        assert calls == dict.fromkeys(names, (2, 2))  # of two ranks


def test_a_gathered_weight_is_a_leaf_that_nothing_else_reads():
    fp8 = torch.zeros(4, 16).to(torch.float8_e4m3fn)
    weight = torch.nn.Parameter(GatheredWeight(fp8, torch.ones(4, 1), (4, 13), torch.bfloat16))
    assert isinstance(weight, GatheredWeight)
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((4, 13), torch.bfloat16, True)
    assert weight.fp8.data_ptr() == fp8.data_ptr()
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert "GatheredWeight(shape=(4, 13)" in repr(weight)
    for read in (lambda: weight + 1, weight.sum, lambda: torch.nn.functional.linear(torch.ones(2, 13), weight)):
        with pytest.raises(InputError, match="gathered in FP8"):
            read()


def test_a_chain_of_gathered_weights(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    kernels = workers.package("gatherable.kernels")
    chain = kernels.BLOCKS()
    assert kernels.BLOCKS((True, False)) is kernels.BLOCKS((True, False))
    first, second = kernels.BLOCKS((True, False)).stages
    assert first.names == ("weight", "weight_fp8", "weight_scale", *chain.stages[0].names[1:])
    assert second == chain.stages[1]
    assert kernels.BLOCKS((True, False)).weights == ((1,),)
    assert with_gathered(chain, (True, True)).weights == ()
