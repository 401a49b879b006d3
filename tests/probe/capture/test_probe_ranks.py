"""Merging over ranks, and models under DDP and FSDP2, in three processes on the CPU (gloo)."""

from __future__ import annotations

from functools import partial, reduce

import pytest
import torch

import loka
from loka.probe.profile import profile_file
from loka.probe.stats.merge import merge_sites
from tests.support.models import probe_models as models
from tests.support.processes import probe_workers as workers
from tests.support.processes.ranks import results_of, start_ranks

NAMES = ("merged", "disagreeing", "ddp", "compiled", "fully_sharded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def plain_policy(folder):
    path = folder / "plain.yaml"
    callables = f"factory: '{models.__name__}:build_plain', inputs: '{models.__name__}:plain_inputs'"
    path.write_text(f"version: 1\nname: plain\nmodel: {{{callables}, batch_size: 32}}\n")
    return path


@pytest.fixture(scope="module")
def saved(folder, plain_policy):
    """What each process got from every function of probe_workers; starting them takes longest."""
    return start_ranks(workers.start, workers.WORLD, folder, str(plain_policy), NAMES)


@pytest.fixture
def run(saved):
    """The results of one function, by rank."""
    return partial(results_of, saved)


def assert_same(one, other, rtol=1e-12):
    """Two SiteStats agree: counts and maxima exactly."""
    for part in ("input", "grad_output"):
        a, b = getattr(one, part), getattr(other, part)
        for name in ("calls", "rows", "sampled", "nonfinite", "nonfinite_calls"):
            assert getattr(a, name) == getattr(b, name)
        for name in ("values", "relative", "row_rms", "row_spread", "block_spread", "call_amax", "column_amax"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        same_moments(a.moments, b.moments, rtol)
    assert torch.equal(one.joint.input_features, other.joint.input_features)
    assert torch.equal(one.joint.grad_features, other.joint.grad_features)
    same_moments(one.joint.moments, other.joint.moments, rtol)


def same_moments(a, b, rtol):
    assert a.count == b.count
    for name in ("mean", "diagonal", "comoment"):
        one, other = getattr(a, name), getattr(b, name)
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.slow
def test_ranks_merge_to_what_one_rank_after_another_gives(run):
    results = run("merged")
    for index in range(len(workers.SHAPES)):
        expected = reduce(merge_sites, [mine[index] for mine, _ in results])
        for _, merged in results:
            assert_same(merged[index], expected)


@pytest.mark.slow
def test_and_to_one_pass_in_float64(run):
    (_, merged), *_ = run("merged")
    x, grad = (
        torch.cat([workers.rows_of(rank, 24, 16)[side] for rank in range(workers.WORLD)]).double() for side in (0, 1)
    )
    for rows, part in ((x, merged[0].input), (grad, merged[0].grad_output)):
        centred = rows - rows.mean(0)
        expected = centred.T @ centred
        assert part.moments.count == sum(workers.ROWS)
        torch.testing.assert_close(part.moments.mean, rows.mean(0), rtol=1e-5, atol=1e-6 * float(rows.abs().max()))
        error = (part.moments.comoment - expected).norm() / expected.norm()
        assert error < 1e-5  # each rank's own is float32
        torch.testing.assert_close(part.column_amax, rows.abs().amax(0), rtol=0, atol=0)


def test_all_ranks_get_the_same_bits(run):
    (_, first), *others = run("merged")
    for _, merged in others:
        for a, b in zip(first[:3], merged[:3], strict=True):
            assert_same(a, b, rtol=0.0)


def test_a_site_that_one_rank_has_seen_and_one_that_nobody_has(run):
    results = run("merged")
    for _, merged in results:
        assert_same(merged[2], results[1][0][2])
        assert merged[3].input is merged[3].grad_output is merged[3].joint is None


def test_ranks_with_other_sites_are_refused_on_every_rank(run):
    messages = run("disagreeing")
    assert all("other sites" in message for message in messages)
    assert "rank 0 has other sites than rank 2" in messages[0]
    assert "rank 2 has other sites than rank 0" in messages[2]


@pytest.mark.slow
def test_ddp_is_seen_and_saved_once(run, folder, plain_policy):
    results = run("ddp")
    merged = []
    for rank in range(workers.WORLD):
        model = models.build_plain()
        with loka.Probe(model, plain_policy, every=1) as probe:
            models.train(model, workers.batches_of(rank), probe, lr=0.0)
            merged.append(probe.stats())
    expected = [reduce(merge_sites, sites) for sites in zip(*merged, strict=True)]
    for stats, samples, _ in results:
        assert samples == 3 * workers.WORLD
        for one, other in zip(stats, expected, strict=True):
            assert_same(one, other, rtol=1e-6)
    recorded = profile_file.load(folder / "merged.safetensors")
    assert recorded.profile.samples == 9
    assert_same(recorded.stats[0], expected[0], rtol=1e-6)
    assert sorted(path.name for path in folder.glob("merged*")) == ["merged.safetensors"]


def test_compiled_and_distributed_in_either_order(run):
    for results in run("compiled"):
        assert results == [((3, 3),) * 4] * 2


@pytest.mark.slow
def test_fsdp2_is_probed_as_ddp_is(run, folder):
    for found, logged, (alone, matrix, parallel) in run("fully_sharded"):
        for kind in ("fsdp", "kept"):
            for one, other in zip(found[kind], found["ddp"], strict=True):
                assert other.input.calls == other.grad_output.calls == 2 * workers.WORLD
                assert_same(one, other, rtol=0.0)
                assert (one.weight.step, one.weight.updates) == (4, 1)
                for part in ("rows", "columns", "row_amax", "values", "row_mean"):
                    assert torch.equal(getattr(one.weight, part), getattr(other.weight, part))
        assert logged == [["grad_output", "input", "weight"]] * 2 + [["grad_output", "input"]] * 4
        assert "give the Probe of every rank group=torch.distributed.group.WORLD" in alone
        assert "is a matrix in one of more dimensions, which is sharded (DTensor)" in matrix
        assert "is a DTensor of other parallelism than fully_shard's" in parallel
    recorded = profile_file.load(folder / "sharded.safetensors")
    assert_same(recorded.stats[0], run("fully_sharded")[0][0]["ddp"][0], rtol=0.0)
    assert recorded.stats[0].weight.step == 4
    assert sorted(path.name for path in folder.glob("sharded*")) == ["sharded.safetensors"]
