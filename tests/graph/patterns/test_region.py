"""Which statements a region takes along, and whose forward must be rewritten for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.expression import Ref, RefKind
from loka.graph.ir import ForwardIR, Statement
from loka.graph.patterns.owners import Barriers, RegionScope, inline_for
from loka.graph.patterns.region import find_regions
from loka.graph.sites.discover import find_sites
from loka.graph.sites.flow import Flow
from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.model.build_model import BuiltModel
from tests.support.expressions import expression, site_call
from tests.support.models import ir_models as zoo


def forward(*lines: str, result: str) -> ForwardIR:
    """ "y = linear x" or "z = add y x"; a linear is the site called like its target, "y = linear.T x" with a permuted
    product."""
    statements = []
    for line in lines:
        target, _, op, *reads = line.split()
        call, refs = None, [Ref(RefKind.LOCAL, name) for name in reads]
        if op.startswith("linear"):
            refs.append(Ref(RefKind.ATTRIBUTE, "self.w"))
            flip = ".transpose(-1, -2)" if op.endswith(".T") else ""
            call = site_call(target, refs, "{0}" + flip, "{1}", None, "{0}" + flip)
        value = expression("torch.nn.functional.layer_norm({0}, (8,))", refs) if op == "layer_norm" else tuple(refs)
        statements.append(Statement(target, op.removesuffix(".T"), value, call))
    return ForwardIR("", "", ("x",), tuple(statements), expression(result), (), "")


def spans(found: ForwardIR, *wanted: str) -> list[tuple[str, int, int]]:
    return [(region.site, region.first, region.last) for region in find_regions(found, set(wanted))]


def test_norm_linear_norm_activation() -> None:
    chain = forward("n = layer_norm x", "y = linear n", "m = layer_norm y", "a = silu m", "v = view a", result="v")
    (region,) = find_regions(chain, {"y"})
    assert (region.first, region.last) == (0, 3)
    assert region.ops == ("layer_norm", "linear", "layer_norm", "silu")
    assert find_regions(chain, set()) == ()


def test_a_norm_that_is_read_elsewhere_stays_outside() -> None:
    assert spans(forward("n = layer_norm x", "y = linear n", "z = add y n", result="z"), "y") == [("y", 1, 2)]
    assert spans(forward("n = layer_norm x", "y = linear n", result="(n, y)"), "y") == [("y", 1, 1)]


def test_a_product_that_is_read_outside_ends_the_region() -> None:
    assert spans(forward("y = linear x", "a = silu y", "c = cat y a", result="c"), "y") == [("y", 0, 0)]
    assert spans(forward("y = linear x", "a = silu y", result="(y, a)"), "y") == [("y", 0, 0)]
    assert spans(forward("y = linear x", "a = silu y", "b = relu a", "c = cat a b", result="c"), "y") == [("y", 0, 1)]


def test_what_is_read_several_times_inside_stays_inside() -> None:
    swish_norm = forward("y = linear x", "n = layer_norm y", "s = sigmoid n", "z = mul y s", "v = view z", result="v")
    assert spans(swish_norm, "y") == [("y", 0, 3)]


def test_a_residual_is_taken_along() -> None:
    assert spans(forward("y = linear x", "a = relu y", "z = add a x", result="z"), "y") == [("y", 0, 2)]


def test_statements_between_end_a_region() -> None:
    assert spans(forward("y = linear x", "q = cat x", "a = relu y", result="(a, q)"), "y") == [("y", 0, 0)]


def test_a_norm_over_something_else_ends_a_region() -> None:
    assert spans(forward("y = linear x", "n = layer_norm x y", result="n"), "y") == [("y", 0, 0)]


def test_a_norm_between_two_linears_belongs_to_the_first() -> None:
    both = forward("y = linear x", "n = layer_norm y", "z = linear n", "a = relu z", result="a")
    assert spans(both, "y", "z") == [("y", 0, 1), ("z", 2, 3)]
    assert spans(both, "z") == [("z", 1, 3)]


def test_a_permuted_product_takes_nothing_along() -> None:
    assert spans(forward("n = layer_norm x", "y = linear.T n", "a = relu y", result="a"), "y") == [("y", 1, 1)]


def test_a_second_gemm_is_not_taken_along() -> None:
    assert spans(forward("y = linear x", "z = linear y", result="z"), "y") == [("y", 0, 0)]


def scopes(
    model: nn.Module, x: Tensor, *wanted: str, barriers: Barriers | None = None, chained: Collection[str] = ()
) -> tuple[RegionScope, ...]:
    """The owners of some sites of a model."""
    found = find_sites(BuiltModel(model, (x,), {}, len(x)))
    return inline_for(model, [found[name] for name in wanted], chained, found.flow.around(wanted), barriers=barriers)


def site(name: str) -> Site:
    return Site(
        name=name,
        kind=GemmKind.LINEAR,
        owner=name.rpartition(".")[0],
        weight=f"{name}.weight",
        bias=None,
        rows=RowCount(1),
        k=8,
        n=8,
        calls=1,
        calls_eval=1,
        share=0.1,
        input_grad=True,
        fed_by=(),
        followed_by=(),
        where="",
    )


X, FEATURES = torch.randn(6, 8), torch.randn(6, 8, 16)


def test_a_norm_before_the_sequential_makes_the_layer_the_owner() -> None:
    inline = ("fmb", "fmb.0", "fmb.1", "fmb.2", "fmb_norm", "out_norm")
    assert scopes(zoo.Wukong(), FEATURES, "layers.1.fmb.0") == (RegionScope("layers.1", inline, ("fmb.0",)),)


def test_siblings_in_a_sequential_need_no_more_than_it() -> None:
    mlp = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1))
    assert scopes(nn.Sequential(mlp, nn.Linear(8, 1)), X, "0.0", "0.3") == (
        RegionScope("0", ("0", "1", "2", "3", "4"), ("0", "3")),
    )  # dropout stays a call


def test_the_end_of_a_sequential_leads_to_its_parent() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU())
    assert scopes(model, X, "0.0") == (RegionScope("", ("0", "0.0", "1"), ("0.0",)),)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(8, 8), torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_perceptron_is_its_linears_owner_and_a_wrapper_is_not() -> None:
    assert scopes(Wrapper(nn.Sequential(Perceptron())), X, "inner.0.linear") == (
        RegionScope("inner.0", ("linear",), ("linear",)),
    )
    model = nn.Sequential(nn.LayerNorm(8), Wrapper(nn.Linear(8, 8)))
    assert scopes(model, X, "1.inner") == (RegionScope("", ("0", "1", "1.inner"), ("1.inner",)),)


def test_a_linear_without_neighbours_needs_no_owner() -> None:
    assert scopes(zoo.Wukong(), FEATURES, "head") == ()
    assert scopes(Wrapper(nn.Linear(8, 8)), X, "inner") == ()


class Gate(nn.Module):
    """A norm and an activation by hand, in names that no function of torch has."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * (torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / 8 + 1e-6) ** -0.5
        return scaled / (1 + torch.exp(-scaled))


class Gated(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.linear, self.gate, self.residual = nn.Linear(8, 8), Gate(), residual

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.gate(self.linear(x))
        return made + x if self.residual else made


@pytest.mark.parametrize("residual", [False, True])
def test_alike_blocks_with_a_norm_by_hand_have_alike_owners(residual: bool) -> None:
    model = nn.Sequential(*(Gated(residual) for _ in range(3)))
    names = [f"{place}.linear" for place in range(3)]
    assert scopes(model, X, *names) == tuple(
        RegionScope(str(place), ("gate", "linear"), ("linear",)) for place in range(3)
    )


class Ranker(nn.Module):
    """A norm stands inside the last layer, and the stream goes on beside what it feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.tower = Wrapper(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.tower(x)


def test_a_norm_that_others_read_too_does_not_make_the_whole_model_the_owner() -> None:
    assert scopes(Ranker(), X, "tower.inner.0") == (RegionScope("tower.inner", ("0", "1"), ("0",)),)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_sum_is_taken_along_by_the_first_hand_written_forward() -> None:
    model = nn.Sequential(Residual(nn.Sequential(nn.Linear(8, 8))), Residual(Feed()))
    assert [scope.owner for scope in scopes(model, X, "0.inner.0", "1.inner.up", "1.inner.down")] == ["0", "1.inner"]
    assert scopes(model, X, "1.inner.down") == ()


def test_a_parameter_in_a_module_of_its_own_takes_the_sum_around_that_along() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = zoo.weight()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    (scope,) = scopes(nn.Sequential(nn.Sequential(Residual(Own()))), X, "0.0.inner.weight")
    assert (scope.owner, scope.inline, scope.sites) == ("0.0", ("inner",), ("inner.weight",))


def test_activations_in_a_list_of_modules_are_within_reach() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.activations = nn.ModuleList([nn.ReLU(), nn.Tanh()])

        def forward(self, x: Tensor) -> Tensor:
            for linear, activation in zip(self.linears, self.activations, strict=True):
                x = activation(linear(x))
            return x

    (scope,) = scopes(nn.Sequential(Listed()), X, "0.linears.0")
    assert scope.owner == "0"
    assert {"activations.0", "activations.1"} <= set(scope.inline)


def test_a_functional_norm_is_within_reach() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(F.layer_norm(x, (8,)))

    scope = RegionScope("1", ("tower", "tower.0"), ("tower.0",))
    assert scopes(nn.Sequential(nn.ReLU(), Functional()), X, "1.tower.0") == (scope,)


def test_parameters_and_regions_of_one_layer_share_its_forward() -> None:
    wanted = ("layers.0.rank", "layers.0.fmb.0", "layers.0.fmb.3", "layers.0.compress")
    (scope,) = scopes(zoo.Wukong(), FEATURES, *wanted)
    assert (scope.owner, scope.sites) == ("layers.0", ("rank", "fmb.0", "compress"))


def test_an_owner_that_would_be_inlined_is_merged() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()))
    assert scopes(model, X, "1.2") == (RegionScope("1", ("1", "2", "3"), ("2",)),)
    (scope,) = scopes(model, X, "1.2", "1.0")
    assert (scope.owner, set(scope.sites)) == ("", {"1.0", "1.2"})
    assert scope.inline == ("0", "1", "1.0", "1.1", "1.2", "1.3")


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)])
def test_norms_over_the_last_dimension_are_inlined(norm: nn.Module) -> None:
    (scope,) = scopes(nn.Sequential(nn.Linear(8, 8), norm), X, "0")
    assert scope.inline == ("0", "1")


def test_an_activation_with_hooks_is_not_inlined() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    assert scopes(model, X, "0") == (RegionScope("", ("0",), ("0",)),)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(self.down(x)) + x


NAMES = ("0.0.down", "0.0.up", "0.1.down", "0.1.up", "1")
CHAIN = Flow(tuple(pairwise(NAMES)), near={"0.0.up": ("0.0",), "0.1.up": ("0.1",)})


def test_chained_linears_of_several_modules_are_joined_in_the_module_that_holds_them() -> None:
    model = nn.Sequential(nn.ModuleList([Cross(), Cross()]), nn.Linear(8, 8))
    wanted = [site(name) for name in NAMES]
    (scope,) = inline_for(model, wanted, set(NAMES), CHAIN)
    assert (scope.owner, sorted(scope.sites)) == ("", list(NAMES))
    assert {"0", "0.0", "0.1", "0.1.down"} <= set(scope.inline)
    within = replace(CHAIN, into=tuple(pair for pair in CHAIN.into if pair[0][:3] == pair[1][:3]))
    apart = inline_for(model, wanted, set(NAMES), within)
    assert [(scope.owner, scope.sites) for scope in apart] == [("0.0", ("down", "up")), ("0.1", ("down", "up"))]
    assert inline_for(model, wanted, {"0.0.up", "1"}, CHAIN)[0].owner != ""  # not chained: nothing is passed on


def test_barriers_leave_the_largest_module_in_front_of_them() -> None:
    model = nn.Sequential(nn.ModuleList([Cross(), Cross()]), nn.Linear(8, 8))
    wanted = [site(name) for name in NAMES]
    for barriers in (Barriers(owners=frozenset({""})), Barriers(closed=frozenset({"0.0", "0.1"}))):
        found = inline_for(model, wanted, set(NAMES), CHAIN, barriers=barriers)
        assert [(scope.owner, scope.sites) for scope in found] == [("0.0", ("down", "up")), ("0.1", ("down", "up"))]
    sequential = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    closed = Barriers(closed=frozenset({"1"}))
    assert scopes(sequential, X, "0", barriers=closed) == (RegionScope("", ("0",), ("0",)),)


def test_in_front_of_a_barrier_some_neighbours_are_left() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Tanh())
    assert [scope.owner for scope in scopes(model, X, "0.0")] == [""]
    assert [scope.owner for scope in scopes(model, X, "0.0", barriers=Barriers(owners=frozenset({""})))] == ["0"]


def test_an_owner_known_already_has_to_be_around_the_site() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8)))
    found = inline_for(model, [site("0")], (), Flow(), held={"0": "1"})
    assert all(scope.owner != "1" for scope in found)


def test_what_stands_around_a_site_is_inlined_wherever_it_stands() -> None:
    head = nn.Sequential(nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1))
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(head))
    (scope,) = scopes(model, X, "0.0")
    assert (scope.owner, scope.inline) == ("", ("0", "0.0", "1", "1.0", "1.0.0", "1.0.1"))
    (closed,) = scopes(model, X, "0.0", barriers=Barriers(closed=frozenset({"1.0"})))
    assert closed.inline == ("0", "0.0")
    head.register_forward_hook(lambda module, given, made: None)
    (hooked,) = scopes(model, X, "0.0")
    assert hooked.inline == ("0", "0.0")


def test_a_sequential_that_is_never_called_is_a_list() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    names = ("0.0", "0.2")
    assert [scope.owner for scope in scopes(model, X, *names, chained=names)] == ["0"]
    uncalled = Barriers(uncalled=frozenset({"0"}))
    assert [scope.owner for scope in scopes(model, X, *names, chained=names, barriers=uncalled)] == [""]
