"""Falling back and returning under torch.compile: each way to run is compiled once."""

from __future__ import annotations

import pytest
import torch

import loka
from tests.support import dispatch_sample as sample

pytestmark = pytest.mark.slow


def loss(model, x):
    return model(x).square().mean()


def test_each_of_the_two_ways_is_compiled_once(model, patch, compilations):
    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    x = torch.randn(8, 32)
    outputs = []
    for _ in range(3):
        outputs.append(compiled(x))
        patch.keep("layers.1.*")
        outputs.append(compiled(x))
        patch.restore("layers.1.*")
    assert compilations.frame_count == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x), outputs[0])
    assert all(torch.equal(one, two) for one, two in zip(outputs, outputs[2:], strict=False))
    assert not torch.equal(outputs[0], outputs[1])


def test_a_guard_in_a_compiled_loop_compiles_once_a_way_through_fall_and_return_twice(
    model, patch, compilations, monkeypatch
):
    head = next(number for number, label in patch._labels() if label == ("head", "fprop"))
    right, broken = sample.kernels.linear_e4m3_rowwise, []

    def linear(x, weight, bias, site):
        y = right(x, weight, bias, site)
        # A check is eager; what the compiler sees is the same throughout.
        return y * torch.nan if not torch.compiler.is_compiling() and broken and site == head else y

    monkeypatch.setattr(sample.kernels, "linear_e4m3_rowwise", linear)
    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    guard = loka.Guard(compiled, patch, loss=loss, every=1, return_after=2)
    found = []
    for faults in ([], ["a fault"], [], ["a fault"], []):
        broken[:] = faults
        for _ in range(3):
            x = torch.randn(8, 32)
            guard.step(x)
            loss(compiled, x).backward()
        found.append((guard.fallen, compilations.frame_count))
        if guard.events and "stays" in guard.events[-1].reason and not faults:
            patch.restore("head")  # by hand: the guard lets none return twice
            loss(compiled, x).backward()
    fell = ("head",)
    assert found == [((), 1), (fell, 2), ((), 2), (fell, 2), (fell, 2)]
    assert [event.action for event in guard.events] == ["fell back", "returned", "fell back"]
    assert compilations.frame_count == 2
    assert guard.fallen == ()


def test_submodules_that_are_compiled_by_themselves(model, patch, compilations):
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=compilations)
    guard = loka.Guard(model, patch, loss=loss, every=2)
    for _ in range(6):
        x = torch.randn(8, 32)
        guard.step(x)
        loss(model, x).backward()
    assert guard.report.step == 5
    assert compilations.frame_count == 2
    assert guard.events == ()


def test_patch_compile_leaves_the_check_eager(model, patch, compilations):
    try:
        patch.compile(backend=compilations)
        guard = loka.Guard(model, patch, loss=loss, every=1)
        guard.step(torch.randn(8, 32))
        assert compilations.frame_count == 0
        loss(model, torch.randn(8, 32)).backward()
        assert compilations.frame_count
    finally:
        sample.kernels.linear_e4m3_rowwise = sample.kernels.linear_e4m3_rowwise.__wrapped__


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_restore_takes_back_what_keep_did(mode, model):
    patch = sample.apply(model, sample.BLOCKS, mode=mode)
    x = torch.randn(8, 32)
    with torch.no_grad():
        expected = model(x)
        assert patch.keep("head", "layers.0.*") == ("layers.0.up.0", "layers.0.down", "head")
        with pytest.raises(loka.BindError, match=r"no site of this patch matches 'heads' \(nearest: head\)"):
            patch.restore("heads")
        with pytest.raises(loka.BindError, match=r"restore takes names.*write patch\.restore\(\*names\)"):
            patch.restore(["head"])
        assert patch.restore("layers.1.*") == ()  # was not sent back
        assert patch.restore("*") == ("layers.0.up.0", "layers.0.down", "head")
        patch.reset()
        assert torch.equal(model(x), expected)
    assert patch.sites == ("layers.0.up.0", "layers.0.down", "layers.1.up.0", "layers.1.down", "head")
    patch.verify(backward=False)
    patch.remove()
    assert type(model.head) is torch.nn.Linear


def test_frozen_weights_are_those_of_the_day_of_their_return(model):
    patch = sample.apply(model, sample.BLOCKS, mode="infer")
    patch.keep("head")
    with torch.no_grad():
        model.head.weight.mul_(3)
        patch.restore("head")
        model(torch.randn(8, 32))
    patch.verify(backward=False)
    model.load_state_dict(model.state_dict())
    patch.verify(backward=False)


def test_what_was_replaced_since_keep_is_not_restored(model, patch):
    patch.keep("head", "layers.0.*")
    model.head = torch.nn.Linear(32, 1)
    with pytest.raises(loka.BindError, match="cannot restore 'head': replaced or bound anew since `keep`"):
        patch.restore("*")
    assert len(patch.sites) == 2
    patch.restore("layers.0.*")
    assert len(patch.sites) == 4
