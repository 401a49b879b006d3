"""What each of two processes runs in the distributed tests; results go to one file a rank."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from loka import dispatch
from loka.dispatch.bind.unplanned import unplanned_products
from loka.dispatch.bind.wrappers import unwrap
from loka.errors import InputError
from loka.graph.planned_model import planned_model
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models
from tests.support.models.growing_models import Experts, inputs
from tests.support.processes.guard_workers import guard_ddp, guard_fsdp  # noqa: F401 - found by name
from tests.support.processes.ranks import run_rank

WORLD = 2
BINDINGS = sample.MLP


def start(rank, folder, names):
    """Run the functions of these names as one rank."""
    run_rank(globals(), names, rank, WORLD, folder)


def batch(rank):
    """This rank's half of 16 rows."""
    torch.manual_seed(7)
    return torch.randn(16, 32)[rank * 8 : rank * 8 + 8]


def full_gradients(model):
    """Gradients, gathered where they are sharded."""
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return grads


def train_step(model, rank):
    """A mean loss over this rank's rows; the mean over ranks is that of the whole batch."""
    model(batch(rank)).square().mean().backward()


def ddp(rank):
    """Apply before wrapping, and after wrapping; both give gradients."""
    results = []
    for before in (True, False):
        model = models.mlp()
        patch = sample.apply(model, BINDINGS) if before else None
        wrapped = DistributedDataParallel(model)
        patch = patch or sample.apply(wrapped, BINDINGS)
        train_step(wrapped, rank)
        verify_first_input_needs_none(patch)
        results.append(full_gradients(wrapped))
        patch.remove()
        wrapped.zero_grad()
        train_step(wrapped, rank)
        results.append(full_gradients(wrapped))
    return results


def ddp_loops(rank):
    """Accumulation without synchronisation, checkpointing of both kinds, and `replicate` instead of DDP."""
    results = {}
    model = models.mlp()
    patch = sample.apply(model, BINDINGS)
    wrapped = DistributedDataParallel(model)
    first, second = batch(rank).chunk(2)
    with wrapped.no_sync():
        (wrapped(first).square().mean() / 2).backward()
    (wrapped(second).square().mean() / 2).backward()
    patch.verify(backward=False)
    results["accumulated"] = full_gradients(wrapped)
    for reentrant in (True, False):
        model = models.mlp()
        patch = sample.apply(model, BINDINGS)
        wrapped = DistributedDataParallel(Checkpointed(model, reentrant))
        train_step(wrapped, rank)
        patch.verify()
        grads = full_gradients(wrapped)
        results[f"checkpointed {reentrant}"] = {name.removeprefix("inner."): grad for name, grad in grads.items()}
    model = models.Blocks()
    block = model.layers[0]
    replicate(block)  # changes the class of the module
    patch = sample.apply(model, (sample.blocks("layers.0", planned=sample.block_fingerprint()),))
    block(batch(rank).requires_grad_()).square().mean().backward()
    patch.verify()
    results["replicated"] = full_gradients(block)
    return results


class Checkpointed(nn.Module):
    """A model whose forward runs again in the backward."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def fsdp_loops(rank):
    """Accumulation without synchronisation, parameters in bfloat16 and on the host; the state_dict is the whole one."""
    mesh = init_device_mesh("cpu", (WORLD,))
    results = {}
    for name, options in (
        ("accumulated", {}),
        ("bfloat16", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        ("offloaded", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ("kept", {"reshard_after_forward": False}),
    ):
        model = models.mlp()
        whole = model.state_dict()
        patch = sample.apply(model, BINDINGS)
        fully_shard(model, mesh=mesh, **options)
        parts = batch(rank).chunk(2) if name == "accumulated" else (batch(rank),)
        for place, part in enumerate(parts):
            model.set_requires_gradient_sync(place == len(parts) - 1)
            (model(part).float().square().mean() / len(parts)).backward()
        patch.verify(backward=False)
        results[name] = full_gradients(model)
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert rank or all(torch.equal(gathered[key], whole[key]) for key in whole)
    return results


def fsdp(rank):
    """fully_shard on each linear and on the model; apply before and after; remove; slices are plain."""
    mesh = init_device_mesh("cpu", (WORLD,))
    results = []
    for before in (True, False):
        model = models.mlp()
        patch = sample.apply(model, BINDINGS) if before else None
        for index in (0, 2, 4):
            fully_shard(model[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = type(model[0])
        patch = patch or sample.apply(model, BINDINGS)
        assert isinstance(model[0], dispatch.Bound)
        assert isinstance(model[0], nn.Linear)
        assert list(model.state_dict()) == list(models.mlp().state_dict())
        for _ in range(2):  # parameters are gathered and freed again in between
            model.zero_grad()
            train_step(model, rank)
        verify_first_input_needs_none(patch)
        results.append(full_gradients(model))
        patch.remove()
        assert not isinstance(model[0], dispatch.Bound)
        assert type(model[0]).__name__ == "FSDPLinear"
        assert before or type(model[0]) is sharded
        model.zero_grad()
        train_step(model, rank)
        results.append(full_gradients(model))
    return results


def fsdp_blocks(rank):
    """Owners with inlined children, sharded as one unit each; a child that is a unit of its own is refused."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = models.Blocks()
    bindings = (sample.blocks("layers.0", "layers.1", planned=sample.block_fingerprint()),)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    patch = sample.apply(model, bindings)
    x = batch(rank).requires_grad_()
    model(x).square().mean().backward()
    patch.verify()
    grads = full_gradients(model)

    refused = models.Blocks()
    fully_shard(refused.layers[0].up[0], mesh=mesh)
    message = sharded_infer = ""
    try:
        sample.apply(refused, bindings)
    except dispatch.BindError as error:
        message = str(error)
    linears = models.mlp()
    fully_shard(linears, mesh=mesh)
    try:
        sample.apply(linears, BINDINGS, mode="infer")
    except dispatch.BindError as error:
        sharded_infer = str(error)
    return grads, message, sharded_infer


def fsdp_adapted(rank):
    """fully_shard between adapt and apply; where it comes before adapt, the model is refused."""
    mesh = init_device_mesh("cpu", (WORLD,))
    no_bias = (dispatch.Adaptation("no_bias", ("0", "2"), sample.LINEAR),)
    bindings = (sample.linears("0", "2", bias=False),)
    model = models.mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.NewModelWarning)
        dispatch.adapt(model, "pkg", no_bias)
    for index in (0, 2, 4):
        fully_shard(model[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dispatch.NewModelWarning)
        patch = dispatch.apply(model, "pkg", bindings, target="reference", adaptations=no_bias)
    train_step(model, rank)
    patch.verify(backward=False)
    refused = models.mlp()
    fully_shard(refused, mesh=mesh)
    message = ""
    try:
        dispatch.apply(refused, "pkg", bindings, target="reference", adaptations=no_bias)
    except dispatch.BindError as error:
        message = str(error)
    return full_gradients(model), message


def fsdp_frozen(rank):
    """Frozen weights, sharded after apply: what works, and what refuses to quantize a part of a weight."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = models.mlp().eval()
    patch = sample.apply(model, BINDINGS[:1], mode="infer")
    frozen = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        before = model(batch(rank))
        for index in (0, 2, 4):
            fully_shard(model[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
        patch.reset()
        after = model.to("cpu")(batch(rank))
    patch.verify(backward=False)
    kept = [torch.equal(one.float(), other.float()) for one, other in zip(frozen, model.buffers(), strict=True)]
    messages = []
    for call in (patch.refresh, lambda: model.load_state_dict(model.state_dict())):
        with pytest.raises(dispatch.BindError) as error:
            call()
        messages.append(str(error.value))
    patch.remove()
    return torch.equal(before, after), kept, messages


def unplanned(rank):
    """What is told of new experts in DDP, and in units of FSDP2 beside a checkpointed one; nothing of old ones."""
    mesh = init_device_mesh("cpu", (WORLD,))
    planned = planned_model(Experts(), inputs(8), {}, 8)

    def sharded(model):
        for expert in model.experts[::2]:
            fully_shard(expert, mesh=mesh)
        model.experts[1] = checkpoint_wrapper(model.experts[1])
        return fully_shard(model, mesh=mesh)

    return [
        unplanned_products(unwrap(wrap(Experts(count))), planned)
        for wrap in (nn.Identity(), sharded, DistributedDataParallel)
        for count in (2, 4)
    ]


def fsdp_inlined(rank):
    """A child that is inlined becomes an FSDP unit of its own after apply: what verify and the next step say of it."""
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0", "layers.1"),))
    model(batch(rank)).square().mean().backward()
    fully_shard(model.layers[0].up[0], mesh=init_device_mesh("cpu", (WORLD,)))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify(backward=False)
    with pytest.raises(InputError) as step:
        model(batch(rank))
    return [*error.value.problems, str(step.value)]


def fsdp_slice(rank):
    """Slices of a bound nn.Sequential are plain, whichever of apply and fully_shard came first."""
    mesh = init_device_mesh("cpu", (WORLD,))
    chain = sample.around(sample.modules.Chain)
    names = []
    for before in (True, False):
        model = models.mlp()
        if before:
            sample.apply(model, (chain,))
        fully_shard(model, mesh=mesh)
        if not before:
            sample.apply(model, (chain,))
        names.append((type(model[:2]).__name__, isinstance(model[:2], dispatch.Bound), len(model[:2])))
    return names


def verify_first_input_needs_none(patch):
    """Every GEMM ran but the first layer's dgrad, whose input is data."""
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert error.value.problems == ("0: dgrad did not run: the input needed no gradient",)
