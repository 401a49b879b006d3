"""What each process runs in the tests of FP8 all-gathers, four on a CPU or two on GPUs; results go to a file a rank."""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import loka
from loka.dispatch import BindError, VerifyError
from loka.errors import InputError
from tests.support.models import sharded_models as models
from tests.support.processes.checkpoint_workers import differences, loaded, resumed  # noqa: F401 - found by name
from tests.support.processes.ranks import run_rank

WORLD = 4
NAMES = (
    "gathers",
    "launched",
    "kinds",
    "loops",
    "compiled",
    "uneven",
    "hybrid",
    "units",
    "tied",
    "odd",
    "asked",
    "refused",
    "resumed",
    "loaded",
    "moved",
    "different",
    "probed",
)


def start(rank, folder, names):
    """Run the functions of these names as one rank."""
    sys.path.insert(0, folder)

    def arguments():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), Path(folder)

    run_rank(globals(), names, rank, WORLD, folder, arguments, 120)


def start_on_gpus(rank, folder, names):
    """The same on two GPUs, with NCCL, everything in bfloat16."""
    sys.path.insert(0, folder)
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    torch.set_default_dtype(torch.bfloat16)

    def arguments():
        return init_device_mesh("cuda", (1, 2), mesh_dim_names=("replicate", "shard")), Path(folder)

    run_rank(globals(), names, rank, 2, folder, arguments, 120, "nccl")


def in_one_pair(function):
    """A function of the first two ranks alone: the others would do the same on their half of the mesh."""

    @wraps(function)
    def run(rank, pairs, folder):
        return function(rank, pairs, folder) if rank < 2 else None

    return run


class Gathered(TorchDispatchMode):
    """Counts the bytes that a rank gets from all-gathers, and the launches that quantize weights."""

    def __init__(self):
        super().__init__()
        self.nbytes = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.nbytes += args[0].nbytes
        self.launches += func.__name__.startswith("quantize_weights")
        return func(*args, **(kwargs or {}))


def package(name):
    """A generated package."""
    return importlib.import_module(name)


def batch(rank, rows=16):
    generator = torch.Generator("cpu").manual_seed(7 + rank)
    return torch.randn(rows, models.WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


def sharded(mesh, fp8, name="gatherable", first="apply", units=True, **options):
    """A bound and sharded tower, its patch, and the report of gather_fp8 if `fp8`."""
    model = models.tower()
    patch = package(name).apply(model) if first == "apply" else None
    for block in model.blocks if units else ():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    patch = patch or package(name).apply(model)
    return model, patch, patch.gather_fp8() if fp8 else None


def trained(model, x, steps=2, run=None):
    """Losses of some steps of SGD, the last result, gradients and parameters, each whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x) if run is None else run(x)
        loss = y.float().square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return {"losses": torch.tensor(losses), "y": y.detach(), **whole(model)}


def whole(model):
    """Gradients and parameters, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in (("grad", parameter.grad), ("weight", parameter.detach())):
            found[f"{kind} {name}"] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return found


def unsharded(rank, mesh, name="gatherable"):
    """The loss, the result and the gradients of one step of the bound model on this rank's rows; means of the mesh."""
    model = models.tower()
    package(name).apply(model)
    y = model(batch(rank))
    loss = y.square().mean()
    loss.backward()
    grads = {}
    for key, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
        grads[key] = parameter.grad / mesh.size()
    return loss.item(), y.detach(), grads


@in_one_pair
def gathers(rank, pairs, folder):
    """Bytes of the all-gathers of one forward, and results against those of the model that is not sharded."""
    mesh, nbytes, results = pairs["shard"], {}, {}
    for fp8 in (False, True):
        model, patch, report = sharded(mesh, fp8)
        with Gathered() as seen:
            y = model(batch(rank))
        nbytes[fp8] = seen.nbytes
        loss = y.square().mean()
        loss.backward()
        results[fp8] = loss.item(), y.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    patch.verify()
    alone = unsharded(rank, mesh)
    same = [found[0] == alone[0] and torch.equal(found[1], alone[1]) for found in results.values()]
    apart = [differences(results[True][2], other) for other in (results[False][2], alone[2])]
    return nbytes, str(report), (report.weight_bytes, report.weight_bytes_before), same, apart


@in_one_pair
def launched(rank, pairs, folder):
    """Launches that quantize weights in a forward and in its backward, of two steps; of two forwards in a row."""
    model, _, _ = sharded(pairs["shard"], True)
    counts = []
    for _ in range(2):
        with Gathered() as forward:
            loss = model(batch(rank)).square().mean()
        with Gathered() as backward:
            loss.backward()
        counts += [forward.launches, backward.launches]
    with torch.no_grad(), Gathered() as twice:
        model(batch(rank))
        model(batch(rank))
    return counts, twice.launches


@in_one_pair
def kinds(rank, pairs, folder):
    """Ways of sharding: what differs from gathering the weights as they are."""
    mesh, found = pairs["shard"], {}
    bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, options in {
        "apply first": {},
        "shard first": {"first": "shard"},
        "one unit": {"units": False},
        "kept": {"reshard_after_forward": False},
        "resharded": {"reshard_after_forward": True},
        "bfloat16": {"mp_policy": bfloat16},
        "mixed": {"name": "mixed"},
    }.items():
        results = []
        for fp8 in (False, True):
            model, patch, _ = sharded(mesh, fp8, **options)
            results.append(trained(model, batch(rank)))
            with torch.no_grad():
                model(batch(rank))
            patch.verify(backward=False)  # also where weights stay gathered
        found[name] = differences(*results)
    found["report"] = str(sharded(mesh, True, name="mixed")[2])
    return found


@in_one_pair
def loops(rank, pairs, folder):
    """Accumulation, checkpoints, evaluation in between, an empty batch."""
    mesh, found = pairs["shard"], {}
    results = {name: [] for name in ("accumulated", "checkpointed", "evaluated", "empty")}
    for fp8 in (False, True):
        model, patch, _ = sharded(mesh, fp8)
        for last, part in enumerate(batch(rank).chunk(2)):
            model.set_requires_gradient_sync(bool(last))
            model.set_reshard_after_backward(bool(last))
            model(part).square().mean().backward()
        results["accumulated"].append(whole(model))

        model, patch, _ = sharded(mesh, fp8)
        run = lambda x, model=model: checkpoint(model, x.requires_grad_(), use_reentrant=False)  # noqa: E731
        results["checkpointed"].append(trained(model, batch(rank), run=run))
        model, patch, _ = sharded(mesh, fp8)
        trained(model, batch(rank))
        with torch.no_grad():
            y = model(batch(rank, 5))
        patch.verify(backward=False)
        results["evaluated"].append({"y": y, **trained(model, batch(rank))})
        model, patch, _ = sharded(mesh, fp8)
        results["empty"].append(trained(model, batch(rank, 0), steps=1))
    for name, pair in results.items():
        for each in pair:
            for values in each.values():
                values.nan_to_num_(7.0)  # the mean of no rows
        found[name] = differences(*pair)
    return found


@in_one_pair
def compiled(rank, pairs, folder):
    """The model compiled as a whole, and unit by unit."""
    mesh, found = pairs["shard"], {}
    backend = "aot_eager" if mesh.device_type == "cpu" else "inductor"
    for name in ("whole", "units"):
        results = []
        for fp8 in (False, True):
            torch.compiler.reset()
            counters.clear()
            model, _, _ = sharded(mesh, fp8)
            for block in model.blocks if name == "units" else ():
                block.compile(backend=backend)
            run = torch.compile(model, backend=backend) if name == "whole" else model
            results.append(trained(model, batch(rank), run=run))
        found[name] = differences(*results), sum(counters["graph_break"].values())
    return found


def uneven(rank, pairs, folder):
    """Three ranks, which have 70, 70 and 68 of 208 rows."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    if rank == 3:
        return []
    model, _, report = sharded(mesh, True)
    parts = [p.to_local().shape[0] for p in (model.blocks[0].up.weight, model.blocks[0].down.weight)]
    results = [trained(model, batch(rank)), trained(sharded(mesh, False)[0], batch(rank))]
    return differences(*results), parts, (report.weight_bytes, report.weight_bytes_before)


def hybrid(rank, pairs, folder):
    """A mesh of two dimensions: sharded in pairs, replicated between them."""
    results = [trained(sharded(pairs, fp8)[0], batch(rank)) for fp8 in (False, True)]
    return differences(*results), pairs.size()


@in_one_pair
def units(rank, pairs, folder):
    """Norms and linears that are units inside of others, as the policy says; units that it does not know."""
    mesh, results, report = pairs["shard"], [], None
    for fp8 in (False, True):
        model = models.tower()
        patch = package("units").apply(model)
        for block in model.blocks:
            for inner in (block.norm, block.down, block):
                fully_shard(inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = patch.gather_fp8() if fp8 else None
        results.append(trained(model, batch(rank)))
        patch.verify(backward=False)
    model = models.tower()
    fully_shard(model.blocks[0].up, mesh=mesh)
    with pytest.raises(BindError) as before:
        package("gatherable").apply(model)
    model = models.tower()
    patch = package("gatherable").apply(model)
    fully_shard(model.blocks[0].up, mesh=mesh)
    with pytest.raises(InputError) as step:
        model(batch(rank))
    with pytest.raises(VerifyError) as verified:
        patch.verify(backward=False)
    return differences(*results), str(report), str(before.value), (str(verified.value), str(step.value))


def both_ways(name, build, rank, pairs):
    """How a model that is one unit differs if it gathers FP8, and the report of gather_fp8."""
    results, report = [], None
    for fp8 in (False, True):
        model = build()
        patch = package(name).apply(model)
        fully_shard(model, mesh=pairs["shard"])
        report = patch.gather_fp8() if fp8 else None
        results.append(trained(model, batch(rank)))
    return differences(*results), report


@in_one_pair
def tied(rank, pairs, folder):
    """A weight of two linears in one generated forward, and one of a linear in it and of another module."""
    found, report = both_ways("tied", models.tied, rank, pairs)
    return found, str(report)


@in_one_pair
def odd(rank, pairs, folder):
    """A weight whose columns are padded, and one whose Parameter is read twice, once by its columns."""
    found, report = both_ways("odd", models.odd, rank, pairs)
    return found, str(report), (report.weight_bytes, report.weight_bytes_before)


def asked(rank, pairs, folder):
    """What the policy has gathered otherwise than in FP8: results, reports, and what is refused."""
    mesh, bfloat16 = pairs["shard"], MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results, report = [], None
    for fp8 in (False, True):
        model, _, report = sharded(mesh, fp8, "asked", mp_policy=bfloat16)
        results.append(trained(model, batch(rank)))
    with pytest.raises(BindError) as wide:
        sharded(mesh, True, "asked")
    model = models.tower()
    package("asked").apply(model)
    part = model.blocks
    fully_shard(part[1], mesh=mesh)
    with pytest.raises(BindError) as other:
        loka.dispatch.patch_of(part).gather_fp8()
    _, _, nothing = sharded(init_device_mesh("cpu", (WORLD,)), True, "native", reshard_after_forward=2)
    return differences(*results), str(report), str(nothing), str(wide.value), str(other.value)


def refused(rank, pairs, folder):
    """What gather_fp8 refuses, and what a model that gathers in FP8 does."""
    mesh, messages = pairs["shard"], {}

    def message(name, call, error=BindError):
        with pytest.raises(error) as caught:
            call()
        messages[name] = str(caught.value)

    model = models.tower()
    patch = package("gatherable").apply(model)
    message("not sharded", patch.gather_fp8)
    fully_shard(model, mesh=mesh)
    model(batch(rank))
    message("late", patch.gather_fp8)
    everyone = init_device_mesh("cpu", (WORLD,))
    message("number", lambda: sharded(everyone, True, reshard_after_forward=2))
    model = models.tower().eval()
    frozen = package("gatherable").apply(model, mode="infer")
    fully_shard(model, mesh=mesh)
    message("infer", frozen.gather_fp8)
    model, patch, _ = sharded(mesh, True)
    message("keep", lambda: patch.keep("blocks.0.up", "blocks.0.down"))
    message("guard", lambda: patch.trial(False).__enter__())
    patch.remove()
    message("own forward", lambda: model(batch(rank)), InputError)
    messages["offloaded"] = str(sharded(mesh, True, offload_policy=CPUOffloadPolicy(pin_memory=False))[2])
    messages["alone"] = str(sharded(DeviceMesh("cpu", [rank], _init_backend=True), True)[2])
    messages["columns"] = str(sharded(mesh, True, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))[2])
    model = models.tower()
    patch = package("gatherable").apply(model)
    fully_shard(model.blocks[0], mesh=mesh)
    messages["partly"] = str(patch.gather_fp8())
    with torch.device("meta"):
        model = models.tower()
    patch = package("gatherable").apply(model)
    fully_shard(model, mesh=mesh)
    message("meta", patch.gather_fp8)
    return messages


@in_one_pair
def moved(rank, pairs, folder):
    """Moving where nothing moves; a cast after gather_fp8, and weights that were assigned."""
    model, patch, _ = sharded(pairs["shard"], True)
    model.to("cpu")
    model(batch(rank)).sum().backward()
    with pytest.raises(BindError) as cast:
        sharded(pairs["shard"], True)[0].to(torch.bfloat16)
    model, patch, _ = sharded(pairs["shard"], True)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    model(batch(rank)).sum().backward()
    with pytest.raises(Exception, match="lost the hooks"):
        patch.verify(backward=False)
    return str(cast.value)


def different(rank, pairs, folder):
    """Ranks with another package, in another mode, with a kept module: what every rank is told."""
    messages = {}

    def bound(name, **options):
        model = models.tower()
        patch = package(name).apply(model, **options)
        for block in model.blocks:
            fully_shard(block, mesh=pairs)
        return model, patch

    model, patch = bound("mixed" if rank == 1 else "gatherable")
    with pytest.raises(BindError) as caught:
        patch.gather_fp8(model)
    messages["package"] = str(caught.value)
    if pairs.size() < WORLD:
        return messages, ()
    model, patch = bound("gatherable", mode="infer" if rank == 3 else "train")
    if rank == 2:
        patch.keep("blocks.1.*")
    with pytest.raises(BindError) as caught:
        patch.verify_ranks()
    messages["mode and sites"] = str(caught.value)
    model, patch = bound("gatherable" if rank else "mixed")
    with pytest.raises(BindError) as caught:
        loka.Guard(model, patch, loss=lambda model, x: model(x).sum())
    messages["guard"] = str(caught.value)
    patch = bound("gatherable")[1]
    if rank < 2:
        patch.keep("blocks.1.*")
    patch.verify_ranks(pairs["shard"].get_group())
    return messages, (package("gatherable").STAMP[:8], package("mixed").STAMP[:8])


@in_one_pair
def probed(rank, pairs, folder):
    """A Probe of the bound and sharded model: what it sees, if weights are gathered in FP8 and if not."""
    found = []
    for fp8 in (False, True):
        model, _, _ = sharded(pairs["shard"], fp8)
        with loka.Probe(model, folder / "gatherable.yaml", every=1, group=pairs["shard"].get_group()) as probe:
            model(batch(rank)).square().mean().backward()
            probe.step()
            found.append({site.name: site for site in probe.stats()})
    one, other = found
    same = {}
    for name, site in one.items():
        for part in ("input", "grad_output", "weight"):
            mine, theirs = getattr(site, part), getattr(other[name], part)
            seen = mine is not None and theirs is not None
            same[f"{name}.{part}"] = torch.equal(mine.values, theirs.values) if seen else (mine, theirs)
    calls = {name: (site.input.calls, site.grad_output.calls) for name, site in other.items() if site.grad_output}
    return sorted(one), same, calls
