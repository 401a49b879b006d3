"""Finding sites leaves no trace on the model, follows the batch, and tells what it cannot run."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from loka.errors import InputError
from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import RowCount
from loka.model.build_model import BuiltModel
from tests.support.models import trap_models as models


def rows_by_hooks(model, *args):
    """Rows of the first call of each nn.Linear in a real forward."""
    rows = {}

    def note(name):
        def hook(module, given, out):
            rows.setdefault(name, given[0].numel() // given[0].shape[-1])

        return hook

    hooks = [m.register_forward_hook(note(n)) for n, m in model.named_modules() if type(m) is nn.Linear]
    with torch.no_grad():
        model(*args)
    for hook in hooks:
        hook.remove()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("planned", [1, 2, 6, 10, 16])
def test_rows_are_those_of_a_real_forward_at_any_batch(planned, batch):
    model = models.Shapes()
    sites = find_sites(BuiltModel(model, (torch.randn(planned, 6, 10),), {}, planned)).sites
    assert {site.name: site.rows.at(batch) for site in sites} == rows_by_hooks(model, torch.randn(batch, 6, 10))


def test_rows_with_a_fixed_part(find):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.tokens = nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return self.fc(torch.cat([self.tokens, x]))

    assert find(Fixed(), torch.randn(6, 8)).sites[0].rows == RowCount(1, 3)


def test_nothing_of_the_model_changes():
    model = models.Rewrites().eval()
    model.fc.train()
    x = torch.randn(5, 8)
    before = copy.deepcopy(model.state_dict())
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    versions = [p._version for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = find_sites(BuiltModel(model, (x,), {}, 5))
    assert [(site.name, site.calls, site.calls_eval) for site in found.sites] == [("fc", 1, 1)]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert (model.steps, model.seen, model.training, model.fc.training) == (0, [], False, True)
    assert not model.fc._forward_hooks
    assert all(p.grad is None and p.is_leaf for p in model.parameters())
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(states[0], torch.get_rng_state())
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_nothing_changes_where_real_samples_are_run():
    model = models.ReadsValues()
    before = copy.deepcopy(model.state_dict())
    found = find_sites(BuiltModel(model, (torch.randn(5, 8),), {}, 5))
    assert [(site.name, site.rows, site.k, site.n) for site in found.sites] == [("fc", RowCount(1), 8, 4)]
    assert any("real samples" in note for note in found.notes)
    assert any("the forward of ReadsValues is not read, but those of its children are" in note for note in found.notes)
    share = 100 * 4 * 6 / (4 * 6 + 8 * 4)  # of `x @ self.weight`
    told = f"not replaced, and not among the sites: {share:.3g} % of the FLOPs of a forward"
    assert f"1 x forward of ReadsValues: {told}" in found.notes
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_children_of_a_forward_that_is_not_read_are_read_alone(find):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(2))
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            if x.sum() == 7:
                raise ValueError("no such sum")
            return self.last(x) * 2

    sites = find(Routed(), torch.randn(5, 8)).sites
    assert [(site.name, site.owner, site.rows, site.input_grad) for site in sites] == [
        ("blocks.0.0", "blocks.0", RowCount(1), False),
        ("blocks.1.0", "blocks.1", RowCount(1), True),
        ("last", "", RowCount(1), True),
    ]
    assert [site.fed_by for site in sites] == [(), ("silu", "linear"), ("silu", "linear")]
    assert [site.followed_by for site in sites] == [("silu", "linear"), ("silu", "forward", "linear"), ("forward",)]


def test_a_branch_on_values_over_a_table_without_memory_is_refused_with_its_line():
    model = models.ReadsValues()
    model.table = nn.Embedding(10, 8, device="meta")
    with pytest.raises(InputError, match=r"ReadsValues reads the value of a tensor at .*models\.py:\d+"):
        find_sites(BuiltModel(model, (torch.randn(5, 8),), {}, 5))


def test_a_forward_that_raises_is_told_with_its_line(find):
    class Broken(nn.Module):
        def forward(self, x):
            return x.no_such_method()

    with pytest.raises(InputError, match=r"Broken raised AttributeError: .*test_discover_effects\.py:\d+; make"):
        find(Broken(), torch.randn(5, 8))


def test_inputs_that_do_not_fit_are_told(find):
    with pytest.raises(InputError, match=r"the forward of Linear raised"):
        find(nn.Linear(8, 4), torch.randn(5, 7))


def test_a_batch_size_written_into_the_model(find):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.register_buffer("shift", torch.zeros(16, 4))

        def forward(self, x):
            return self.fc(x) + self.shift

    found = find(Written(), torch.randn(16, 8))
    assert found.sites[0].rows == RowCount(1)
    assert any("written into the forward" in note for note in found.notes)


def test_training_and_evaluation_are_counted_apart(find):
    sites = {site.name: site for site in find(models.TrainsOtherwise(), torch.randn(5, 16)).sites}
    calls = {name: (site.calls, site.calls_eval) for name, site in sites.items()}
    assert calls == {"main": (1, 1), "auxiliary": (1, 0), "serving": (0, 1)}
    assert sites["serving"].share == 0
    assert sites["serving"].blocked is None


def test_parts_without_gradients_need_no_input_gradient(find):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8).requires_grad_(False)
            self.first = nn.Linear(8, 8).requires_grad_(False)
            self.second = nn.Linear(8, 8)
            self.third = nn.Linear(8, 1)

        def forward(self, ids):
            return self.third(self.second(self.first(self.embed(ids))))

    sites = find(Frozen(), torch.randint(0, 10, (5,))).sites
    assert [site.input_grad for site in sites] == [False, False, True]


def test_rare_products_are_notes(find):
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8, 3))
            self.pairs = nn.Bilinear(6, 6, 4)

        def forward(self, x):  # (B, 6)
            return torch.linalg.multi_dot([x, self.a, self.b]).sum() + self.pairs(x, x).sum() + torch.inner(x, x).sum()

    found = find(Rare(), torch.randn(5, 6))
    flops = {each.what: each.flops.at(5) for each in found.opaque}
    chain, pairs = 2 * 5 * (6 * 8 + 8 * 3), 2 * 5 * (6 * 24 + 6 * 4)
    assert flops["linalg_multi_dot"] == chain
    assert flops["bilinear"] == pairs
    assert flops["inner"] > 0
    assert any(note.startswith("1 x bilinear: not replaced, and not among the sites") for note in found.notes)


def test_convolutions_and_recurrent_layers_are_notes(find):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 6, 3, padding=1)
            self.gru = nn.GRU(6, 8, batch_first=True)
            self.fc = nn.Linear(8, 1)

        def forward(self, x):
            return self.fc(self.gru(self.conv(x).transpose(1, 2))[0][:, -1])

    found = find(Sequence(), torch.randn(5, 4, 9))
    assert [site.name for site in found.sites] == ["fc"]
    assert len(found.notes) == 2
    flops = {"conv1d": 2 * 5 * 6 * 9 * 4 * 3, "gru": 2 * 5 * 9 * 24 * (6 + 8)}
    total = sum(flops.values()) + 2 * 5 * 8
    left = "not replaced, and not among the sites"
    assert found.notes == tuple(
        f"1 x {op}: {left}: {100 * each / total:.3g} % of the FLOPs of a forward" for op, each in flops.items()
    )


def test_products_under_vmap_are_a_note(find):
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.rank = nn.Parameter(torch.randn(4, 3))
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x.T @ self.rank)

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.out = Single(), nn.Linear(2, 1)

        def forward(self, x):
            return self.out(torch.vmap(self.single)(x))

    found = find(Mapped(), torch.randn(5, 4, 9))
    assert [site.name for site in found.sites if site.calls] == ["out"]
    unseen = "not seen, neither among the sites nor in their shares"
    assert found.notes == (
        f"products under torch.vmap or another transform of torch.func in 'single', 'single.fc': {unseen}",
    )


def test_keyword_inputs_and_containers(find):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, features, *, scale):
            return self.fc(features["dense"]) * scale

    model = Takes()
    kwargs = {"features": {"dense": torch.randn(5, 8)}, "scale": torch.ones(())}
    found = find_sites(BuiltModel(model, (), kwargs, 5))
    assert [(site.name, site.rows) for site in found.sites] == [("fc", RowCount(1))]


def test_a_forward_may_change_the_containers_that_it_is_given():
    class Pops(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, features, parts):
            features["sum"] = features.pop("dense") + parts.pop()
            return self.fc(features["sum"])

    kwargs = {"features": {"dense": torch.randn(5, 8)}, "parts": [torch.randn(5, 8)]}
    found = find_sites(BuiltModel(Pops(), (), kwargs, 5))
    assert [site.name for site in found.sites] == ["fc"]
    assert (list(kwargs["features"]), len(kwargs["parts"])) == (["dense"], 1)


@pytest.mark.slow
def test_many_layers_are_quick_and_all_found():
    layers = [layer for _ in range(1000) for layer in (nn.Linear(64, 64), nn.ReLU())]
    found = find_sites(BuiltModel(nn.Sequential(*layers), (torch.randn(512, 64),), {}, 512))
    assert len(found.sites) == 1000
    assert {(site.rows, site.k, site.n, site.calls, site.calls_eval) for site in found.sites} == {
        (RowCount(1), 64, 64, 1, 1)
    }
    assert [site.input_grad for site in found.sites[:2]] == [False, True]
    assert found.sites[5].fed_by == ("relu", "linear")


def test_a_product_inside_an_autograd_function_is_blocked(find):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return Own.apply(x, self.weight)

    site = find(Holder(), torch.randn(5, 8)).sites[0]
    assert (site.weight, site.k, site.n) == ("weight", 8, 4)
    assert "autograd.Function" in site.blocked


@pytest.mark.parametrize("made", [None, "text", b"", 0.5, 3, True])
def test_a_forward_that_returns_no_tensor_is_refused(made):
    class Silent(nn.Linear):
        def forward(self, x):
            super().forward(x)
            return made

    says = rf"the forward of Silent raised TypeError: it returned {made!r}, from which nothing can be trained"
    with pytest.raises(InputError, match=says):
        find_sites(BuiltModel(Silent(8, 8), (torch.randn(5, 8),), {}, 5))
