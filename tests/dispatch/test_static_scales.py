"""Static scales of bound modules: their buffers, what is reported, and what wrappers make of them."""

from __future__ import annotations

import gc
import struct
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka import dispatch
from tests.support import dispatch_sample as sample


class Counting(dispatch.Bound):
    """A linear that counts rows as if they were elements over its scale, and knows the largest of them."""

    loka_known = (dispatch.StaticScale(0, "input", 3.5, 0.0078125),)

    def forward(self, x):
        with torch.no_grad():
            self.loka_input_record_0[0] += len(x)
            self.loka_input_record_0[1] = struct.unpack("i", struct.pack("f", 7.25))[0]
        return torch.nn.functional.linear(x, self.weight, self.bias)


def bindings(*names):
    return (replace(sample.linears(*names), bound=Counting, infer=False, gemms=((),)),)


def test_what_is_reported(model):
    with sample.apply(model, bindings("0", "2")) as patch:
        assert patch.overflows() == ()
        model(torch.randn(5, 32))
        first, second = patch.overflows()
        assert (first.site, second.site) == ("0", "2")
        assert first == dispatch.Overflow("0", "input", elements=5, largest=7.25, amax=3.5)
        assert str(first) == "0: input: 5 elements saturated; the largest magnitude was 7.25, known was amax 3.5"
        with pytest.warns(dispatch.LokaWarning, match="2 operands had more than their static scales hold"):
            patch.verify()
        patch.reset()
        assert patch.overflows() == ()
    with pytest.raises(dispatch.BindError, match="cannot ask for overflows: this patch was removed"):
        patch.overflows()


def test_scales_and_records_are_buffers_that_leave_no_trace(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patch = sample.apply(model, bindings("0"))
    scale, record = model[0].loka_input_scale_0, model[0].loka_input_record_0
    assert (scale.dtype, scale.shape, scale.item()) == (torch.float32, (1, 1), 0.0078125)
    assert (record.dtype, record.tolist()) == (torch.int64, [0, 0])
    assert model.state_dict().keys() == before.keys()
    model(torch.randn(5, 32))
    model.half().float()
    assert model[0].loka_input_scale_0.item() == 0.0078125
    assert patch.overflows()[0].elements == 5
    patch.remove()
    assert not list(model.buffers())
    assert not [name for module in model.modules() for name in vars(module) if name.startswith(("loka", "_ddp"))]


def test_a_scale_is_float32_whatever_torch_s_default(model):
    torch.set_default_dtype(torch.bfloat16)
    try:
        sample.apply(model, bindings("0"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert model[0].loka_input_scale_0.dtype == torch.float32


def test_ddp_leaves_the_records_of_each_rank_alone(model, tmp_path):
    model.register_buffer("own", torch.zeros(1))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        patch = sample.apply(model, bindings("0"))
        wrapped = DistributedDataParallel(model)
        assert wrapped.modules_buffers == []
        wrapped(torch.randn(3, 32)).sum().backward()
        assert patch.overflows()[0].elements == 3
        patch.remove()
        assert model._ddp_params_and_buffers_to_ignore == ["own"]
    finally:
        wrapped = None
        gc.collect()  # where DDP's reducer is the last to hold the group, freeing it can wait for ever
        dist.destroy_process_group()


def test_the_names_in_the_root(model):
    alone = nn.Linear(32, 32)
    patch = sample.apply(alone, bindings(""))
    assert alone._ddp_params_and_buffers_to_ignore == ["loka_input_scale_0", "loka_input_record_0"]
    patch.remove()
    assert not hasattr(alone, "_ddp_params_and_buffers_to_ignore")
