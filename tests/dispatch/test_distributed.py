"""DDP and FSDP2 in two processes on the CPU (gloo), and torchrec's DistributedModelParallel in this one."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models
from tests.support.processes import dispatch_workers as workers
from tests.support.processes.ranks import results_of, start_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What each of two processes got from every function of dispatch_workers; starting them takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    sharded = ("fsdp", "fsdp_blocks", "fsdp_slice", "fsdp_adapted", "fsdp_frozen", "fsdp_inlined", "fsdp_loops")
    names = ("ddp", "ddp_loops", *sharded, "unplanned", "guard_ddp", "guard_fsdp")
    return start_ranks(workers.start, workers.WORLD, folder, names)


@pytest.fixture
def run(saved):
    """The results of one function, by rank."""
    return partial(results_of, saved)


def single_process(bind, model=None, parts=1):
    """Gradients of the mean of both ranks' losses, in this process; each rank's rows in a number of parts."""
    model = model or models.mlp()
    patch = bind(model) if bind else None
    for rank in range(workers.WORLD):
        for part in workers.batch(rank).chunk(parts):
            (model(part).square().mean() / workers.WORLD / parts).backward()
    if patch:
        patch.verify(backward=False)
    return workers.full_gradients(model)


def assert_same(one, other, rtol=1e-4, atol=1e-6):
    """Every gradient agrees."""
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_agree_across_ranks_and_with_one_process(run, kind):
    first, second = run(kind)
    bound, plain = single_process(lambda model: sample.apply(model)), single_process(None)
    assert len(first) == 4
    for index, gradients in enumerate(first):
        assert_same(gradients, second[index], rtol=0, atol=0)
        assert_same(gradients, bound if index % 2 == 0 else plain)
    assert not torch.equal(bound["2.weight"], plain["2.weight"])


@pytest.mark.slow
def test_what_loops_do_with_ddp(run):
    first, second = run("ddp_loops")
    for name, gradients in first.items():
        assert_same(gradients, second[name], rtol=0, atol=0)
    for name, parts in (("accumulated", 2), ("checkpointed True", 1), ("checkpointed False", 1)):
        assert_same(first[name], single_process(lambda model: sample.apply(model), parts=parts))
    block = models.Blocks().layers[0]
    sample.apply(block, (sample.blocks(""),))
    for rank in range(workers.WORLD):
        (block(workers.batch(rank)).square().mean() / workers.WORLD).backward()
    assert_same(first["replicated"], workers.full_gradients(block))


@pytest.mark.slow
def test_what_loops_do_with_fsdp(run):
    first, second = run("fsdp_loops")
    for name, gradients in first.items():
        assert_same(gradients, second[name], rtol=0, atol=0)
        bound = single_process(lambda model: sample.apply(model), parts=2 if name == "accumulated" else 1)
        error = torch.cat([(gradients[key] - bound[key]).flatten() for key in bound]).norm()
        whole = torch.cat([grad.flatten() for grad in bound.values()]).norm()
        assert error <= (0.2 if name == "bfloat16" else 1e-5) * whole


@pytest.mark.slow
def test_fsdp_units_with_inlined_children(run):
    (gradients, refusal, infer), (others, *_) = run("fsdp_blocks")
    bind = lambda model: sample.apply(model, (sample.blocks("layers.0", "layers.1"),))  # noqa: E731
    assert_same(gradients, others, rtol=0, atol=0)
    assert_same(gradients, single_process(bind, models.Blocks()))
    assert "'layers.0': its child 'up.0' is an FSDP unit of its own" in refusal
    assert "'0', '2', '4': weight is sharded: apply mode='infer' to the whole model, before fully_shard" in infer


def test_slices_of_a_sharded_sequential_are_plain(run):
    for names in run("fsdp_slice"):
        assert names == [("Sequential", False, 2), ("Sequential", False, 2)]


def test_an_adapted_model_is_sharded_between_adapt_and_apply(run):
    (gradients, message), (others, _) = run("fsdp_adapted")
    assert list(gradients) == ["0.weight", "2.weight", "4.weight", "4.bias"]
    assert_same(gradients, others)
    assert "sharded by fully_shard: adapt before sharding" in message


def test_frozen_weights_that_are_sharded_after_apply(run):
    for same, kept, messages in run("fsdp_frozen"):
        assert same
        assert kept == [True] * 4
        assert len(messages) == 2
        for message in messages:
            assert "0: FSDP has split the weights since apply" in message
            assert "apply with mode='infer', then shard (fully_shard), in this order" in message


def test_new_gemms_are_told_beneath_ddp_and_fsdp(run):
    for none, told, *wrapped in run("unplanned"):
        assert none == ""
        assert "2 of 4 Expert in 'experts' ('experts.2', 'experts.3')" in told
        assert wrapped == [none, told] * 2


def test_an_inlined_child_that_was_sharded_since_is_named_by_verify_and_stops_the_step(run):
    for *problems, step in run("fsdp_inlined"):
        assert "a weight of shape (64, 32) is sharded and its input is not: " in step
        assert (
            "'layers.0': its child 'up.0' is an FSDP unit of its own: shard the module around it instead, or write "
            'units: ["*.up.0"] in the policy and run loka generate again'
        ) in problems


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guard_ddp", "guard_fsdp"])
def test_ranks_with_a_guard_decide_together_and_train_as_without(run, kind):
    first, second = run(kind)
    assert first["same"] == second["same"] == [True] * len(models.Blocks().state_dict())
    for rank in (first, second):
        assert rank["healthy"] == ()
        assert rank["events"] == [("fell back", "layers.1", 4), ("returned", "layers.1", 8)]
        assert rank["fallen"] == [("layers.1",), ()]
        assert rank["resumed"] == ([("layers.1",), ()], [("returned", "layers.1", 8)], 0)
        assert rank["nan"][:3] == ("not finite", "head", 0)
        assert rank["nan"][3].endswith("is made here, without FP8 too: its output, on rank 1")
        assert rank["classes"] == 2  # compiled code is for one class: each comes back as it was
    assert first["report"] == second["report"]  # figures are those of all ranks
    assert first["state"] == second["state"]


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()  # where DDP's reducer is the last to hold the group, freeing it can wait for ever
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_torchrecs_distributed_model_parallel(group, before):
    parallel = pytest.importorskip("torchrec.distributed.model_parallel", reason="torchrec is an extra")
    model = models.mlp()
    patch = sample.apply(model, workers.BINDINGS) if before else None
    wrapped = parallel.DistributedModelParallel(model, device=torch.device("cpu"))
    patch = patch or sample.apply(wrapped, workers.BINDINGS)
    assert patch.sites == ("0", "2", "4")
    assert dispatch.patch_of(wrapped).sites == patch.sites
    workers.train_step(wrapped, 0)
    workers.verify_first_input_needs_none(patch)
    patch.remove()
    assert type(model[0]) is torch.nn.Linear
