"""`patch.ranges()`: a trace of torch.profiler names bound modules, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

from loka import dispatch
from loka.dispatch.bind.bound import derived_class
from loka.errors import InputError
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

FORWARD, BACKWARD = "loka: {} (fprop FP8)", "loka: {} (backward of {})"


def trained(model, x):
    """Output and gradients of one step."""
    out = model(x)
    out.sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def ranges_of(patch, run):
    """The names of our ranges in a trace, with how often each is there."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, patch.ranges():
        run()
    names = [event.name for event in profiler.events() if event.name.startswith("loka: ")]
    return {name: names.count(name) for name in names}


def test_forward_and_backward_of_each_module_are_named():
    model = models.mlp()
    patch = sample.apply(model)
    found = ranges_of(patch, lambda: trained(model, torch.randn(4, 32)))
    function = next(name for name in found if "backward" in name).partition(" of ")[2].rstrip(")")
    assert found == {
        name: 1 for site in ("0", "2", "4") for name in (FORWARD.format(site), BACKWARD.format(site, function))
    }


def test_a_module_with_several_sites_names_those_in_fp8():
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0"),))
    found = ranges_of(patch, lambda: model(torch.randn(4, 32)))
    assert list(found) == ["loka: layers.0 (fprop FP8 of up.0, down)"]
    without = models.mlp()
    patch = sample.apply(without, (sample.linears("0", gemms=("wgrad",)), sample.linears("2")))
    assert list(ranges_of(patch, lambda: without(torch.randn(4, 32)))) == [
        "loka: 0 (fprop as-is)", "loka: 2 (fprop FP8)",
    ]  # fmt: skip


def test_a_range_surrounds_its_function():
    model = models.mlp()
    patch = sample.apply(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, patch.ranges():
        trained(model, torch.randn(4, 32))
    events = profiler.events()
    for label, operators in ((FORWARD.format("2"), 1), ("loka: 2 (backward", 2)):  # fprop; dgrad and wgrad
        (outer,) = [event for event in events if event.name.startswith(label)]
        inside = [event for event in events if outer.time_range.start <= event.time_range.start < outer.time_range.end]
        assert sum(event.name.startswith("loka::") for event in inside) == operators


def test_results_are_the_same_to_the_bit():
    model, x = models.mlp(), torch.randn(4, 32, requires_grad=True)
    other = copy.deepcopy(model)
    patch, plain = sample.apply(model), sample.apply(other)
    with profile(activities=[ProfilerActivity.CPU]), patch.ranges():
        one = trained(model, x)
    assert all(torch.equal(a, b) for a, b in zip(one, trained(other, x), strict=True))
    patch.verify()
    plain.verify()


def test_outside_and_without_a_profiler_nothing_is_recorded(monkeypatch):
    model = models.mlp()
    patch = sample.apply(model)
    forwards = [vars(derived_class(type(model[0])))["forward"]]
    monkeypatch.setattr("loka.dispatch.ranges.record_function", None)  # calling it would raise
    with patch.ranges():
        model(torch.randn(4, 32))
    assert [vars(derived_class(type(model[0])))["forward"]] == forwards
    with profile(activities=[ProfilerActivity.CPU]):
        model(torch.randn(4, 32))


def test_it_ends_where_the_step_raises():
    model = models.mlp()
    patch = sample.apply(model)
    forward = vars(derived_class(type(model[0])))["forward"]
    with pytest.raises(InputError), patch.ranges():
        model(torch.randn(4, 31))
    assert vars(derived_class(type(model[0])))["forward"] is forward


@pytest.mark.parametrize(("before", "graphs"), [(True, 1), (False, 2)])
def test_a_compiled_model_runs_as_it_was_compiled_and_is_compiled_once_more_inside(before, graphs):
    model, x = models.mlp(), torch.randn(4, 32)
    patch = sample.apply(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if before:
        compiled(x)
    for _ in range(2):
        assert ranges_of(patch, lambda: compiled(x)) == {}
        compiled(x)
    assert counter.frame_count == graphs


def test_frozen_modules_are_named_too():
    model = models.mlp().eval()
    patch = sample.apply(model, mode="infer")
    with torch.no_grad():
        found = ranges_of(patch, lambda: model(torch.randn(4, 32)))
    assert list(found) == [FORWARD.format(site) for site in ("0", "2", "4")]


def test_a_removed_patch_names_nothing():
    patch = sample.apply(models.mlp())
    patch.remove()
    with pytest.raises(dispatch.BindError, match="cannot name ranges: this patch was removed"), patch.ranges():
        pass
