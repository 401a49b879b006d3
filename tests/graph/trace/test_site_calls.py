"""GEMMs on Parameters, however they are written, as y = linear(x, weight, bias) between two changes of view."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import source
from loka.graph.expression import text_of
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples
from loka.graph.trace.trace import trace_forward
from loka.probe.capture.operand_views import einsum_views, tensordot_views
from tests.support.models import ir_models as zoo


class One(nn.Module):
    """A Parameter of (8, 6), and one of (6,)."""

    def __init__(self) -> None:
        super().__init__()
        self.p = zoo.weight(8, 6)
        self.b = nn.Parameter(torch.randn(6))


class Linear(One):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., :6], self.p)


class LinearOfTranspose(One):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.p.t(), self.b)


class Operator(One):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p


class OperatorOfT(One):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :6] @ self.p.T


class Method(One):
    def forward(self, x: Tensor) -> Tensor:
        return x.matmul(self.p)


class Keyword(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, other=self.p)


class FromTheLeft(One):
    def forward(self, x: Tensor) -> Tensor:
        return self.p.transpose(0, 1) @ x.transpose(1, 2)


class Addmm(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x[:, 0], self.p)


class AddmmScaled(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x[:, 0], self.p, alpha=2)


class Einsum(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,dk->bkn", x, self.p)


class EinsumFirst(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("dk,...d->...k", self.p, x)


class Tensordot(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.p, dims=([2], [0]))


class TensordotFirst(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(self.p.t(), x.mT, ([-1], (1,)))


class TensordotByNumber(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.p, 1)


class EinsumOfThree(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,dk,bmd->kbnm", x, self.p, x.tanh())


class EinsumOfThreeOverNothing(One):
    """What the Parameter shares with the others is no sum."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,dk,bmd->bdk", x, self.p, x)


class EinsumShared(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("dk,bnd->bndk", self.p, x)


class EinsumOfOne(One):
    """Beside a product with the Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p + torch.einsum("dk->k", self.p)


class Convolution(nn.Module):
    """Of size 1, (out, in, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.b = nn.Parameter(torch.randn(6, 3, 1)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.p, self.b, padding=0)


class ConvolutionInGroups(Convolution):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.p, groups=3)


class ConvolutionInSteps(Convolution):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.p, stride=2)


CALLS = {  # the weight and the bias of the linear that each is
    Linear: ("self.p", None),
    LinearOfTranspose: ("self.p.t()", "self.b"),
    Operator: ("self.p.t()", None),
    OperatorOfT: ("self.p", None),
    Method: ("self.p.t()", None),
    Keyword: ("self.p.t()", None),
    FromTheLeft: ("self.p.t()", None),
    Addmm: ("self.p.t()", "self.b"),
    Einsum: ("self.p.t()", None),
    Tensordot: ("self.p.t()", None),
    TensordotFirst: ("self.p.t()", None),
    TensordotByNumber: ("self.p.t()", None),
    Convolution: ("self.p.flatten(-2)", "self.b"),
    EinsumFirst: ("self.p.t()", None),
}


def traced(module: nn.Module, *sites: str, shape: tuple[int, ...] = (3, 8)) -> ForwardIR | Refused:
    calls = tuple(ExampleCall(batch, (torch.randn(batch, *shape),), {}) for batch in (4, 7))
    return trace_forward(module, "owner", Examples("owner", calls), sites=sites)


def weights_of(forward: ForwardIR) -> list[str]:
    """The weight of each call, as an expression."""
    return [text_of(s.call.weight) for s in forward.statements if s.call is not None]


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_a_gemm_on_a_parameter_becomes_a_linear(kind: Callable[[], nn.Module]) -> None:
    answer = traced(kind(), "p")
    assert isinstance(answer, ForwardIR), answer
    (step,) = [step for step in answer.statements if step.call is not None]
    assert step.call is not None
    weight, bias = text_of(step.call.weight), step.call.bias and text_of(step.call.bias)
    assert (weight, bias) == CALLS[kind]


@pytest.mark.parametrize(
    "kind",
    [
        AddmmScaled,
        EinsumOfThree,
        EinsumShared,
        EinsumOfOne,
        EinsumOfThreeOverNothing,
        ConvolutionInGroups,
        ConvolutionInSteps,
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_gemm_that_is_no_linear_is_refused_by_name(kind: Callable[[], nn.Module]) -> None:
    answer = traced(kind(), "p")
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("'p' goes into '")
    assert " in a form that is not y = x @ weight.T at test_site_calls.py:" in answer.reason


class Unused(One):
    """A product that nothing reads, as the shared gate of the last level of PLE as it is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.q = zoo.weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        F.linear(x[..., :6], self.p).relu()
        return x @ self.q


def test_a_product_that_nothing_reads_is_said_to_be_unused() -> None:
    answer = traced(Unused(), "p", "q")
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("'p' makes what is not used at test_site_calls.py:")
    assert isinstance(traced(Unused(), "q"), ForwardIR)


@pytest.mark.parametrize(
    ("x", "p", "out", "views"),
    [
        ("bd", "kd", "bk", ("", False, "")),
        ("bd", "dk", "bk", ("", True, "")),
        ("bnd", "nk", "bkd", (".permute(0, 2, 1)", True, ".permute(0, 2, 1)")),
        ("bnd", "nk", "bdk", (".permute(0, 2, 1)", True, "")),
        ("...nd", "nk", "...kd", (".movedim(-2, -1)", True, ".movedim(-1, -2)")),
        ("bnd", "nk", "bnk", None),  # n is in the Parameter, the input and the output
        ("bnd", "dk", "bk", None),  # n is summed besides
        ("bdd", "dk", "bk", None),
        ("bd", "dd", "bd", None),
        ("bd", "d...", "b...", None),
        ("...nd", "nk", "...dk", (".movedim(-2, -1)", True, "")),
        ("...mnd", "dk", "...nmk", None),
    ],
)
def test_einsum(x: str, p: str, out: str, views: tuple[str, bool, str] | None) -> None:
    assert einsum_views(x, p, out) == views
    if views is not None:
        a, weight = torch.randn([{"b": 2, "n": 3, "d": 4, "m": 5}.get(c, 2) for c in x.replace("...", "z")]), None
        weight = torch.randn([{"k": 6, "n": 3, "d": 4}[c] for c in p])
        made = eval(f"F.linear(a{views[0]}, weight{'.t()' if views[1] else ''}){views[2]}")  # noqa: S307
        assert torch.allclose(made, torch.einsum(f"{x},{p}->{out}", a, weight), atol=1e-5)


@pytest.mark.parametrize("dims", [0, 2, ([1, 2], [0, 1]), ([], []), (1, 2, 3), None, ("a", [0])])
def test_other_tensordots_are_no_linear(dims: object) -> None:
    assert tensordot_views(dims, left=False) is None


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("of_x", "of_p"), [(0, 0), (1, 1), (-1, -2), (2, -1)])
def test_tensordot(of_x: int, of_p: int, left: bool) -> None:
    x, p = torch.randn(4, 4, 4), torch.randn(4, 4)
    views = tensordot_views(((of_p,), (of_x,)) if left else (of_x, [of_p]), left)
    assert views is not None
    made = eval(f"F.linear(x{views[0]}, p{'.t()' if views[1] else ''}){views[2]}")  # noqa: S307
    whole = torch.tensordot(p, x, ([of_p], [of_x])) if left else torch.tensordot(x, p, ([of_x], [of_p]))
    assert torch.allclose(made, whole, atol=1e-5)


class Twice(One):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.p) @ self.p.t()


def test_a_parameter_that_is_used_twice_has_two_calls() -> None:
    answer = traced(Twice(), "p")
    assert isinstance(answer, ForwardIR)
    assert weights_of(answer) == ["self.p.t()", "self.p"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Matrices(nn.Module):
    """Matrices of Parameters of three and four dimensions, taken in every way; one is no site's, and stays."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8, 8))
        self.deep = nn.ParameterList([nn.Parameter(torch.randn(2, 2, 8, 8))])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.w[0].t() @ self.w[-1] @ self.w.select(0, 1) @ self.w[2]
        row = self.deep[0][1]
        for matrix in self.deep[0][0]:
            x = torch.tanh(F.linear(x, matrix))
        return F.linear(x, row[0]) @ row.unbind()[1] @ self.deep[0][1, 0]


MATRICES = {
    "w.0": "self.w[0]",
    "w.3": "self.w[3]",
    "w.1": "self.w[1]",
    "deep.0.0.0": "self.deep[0][0][0]",
    "deep.0.0.1": "self.deep[0][0][1]",
    "deep.0.1.0": "self.deep[0][1][0]",
    "deep.0.1.1": "self.deep[0][1][1]",
}


def test_matrices_of_parameters_are_weights_by_their_place() -> None:
    answer = traced(Matrices(), *MATRICES)
    assert isinstance(answer, ForwardIR), answer
    sites = [step.call.site for step in answer.statements if step.call is not None]
    weights = [weight.removesuffix(".t()") for weight in weights_of(answer)]
    assert list(zip(sites, weights, strict=True)) == [*MATRICES.items(), ("deep.0.1.0", "self.deep[0][1][0]")]
    others = [step.text() for step in answer.statements if step.call is None]
    assert others[:2] == ["item_2 = self.w[2]", "matmul_3 = matmul_2 @ item_2"]
    assert all("tanh" in text for text in others[2:])


class Unbound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for down, up in zip(self.down.unbind(), torch.unbind(self.up, 0), strict=True):
            x = x + F.linear(F.linear(x, down), up)
        return x


def test_a_loop_over_unbound_matrices() -> None:
    sites = ("down.0", "up.0", "down.1", "up.1")
    answer = traced(Unbound(), *sites)
    assert isinstance(answer, ForwardIR), answer
    assert [step.call.site for step in answer.statements if step.call is not None] == list(sites)


class Forms(nn.Module):
    """Weights and vectors in other forms: cast, one of each sample, rows of Parameters; and the batch as a length."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.rank = zoo.weight(8, 8), zoo.weight(8, 4)
        self.biases = nn.Parameter(torch.randn(2, 8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.w.to(x.dtype), self.shift.to(x.dtype)) + self.biases[1]
        mixed = torch.bmm(x, self.rank.unsqueeze(0).expand(len(x), -1, -1))
        mixed = mixed + x @ self.rank.type_as(x)
        return (mixed + torch.bmm(self.w[None].expand(x.shape[0], 8, 8).mT, x.mT).mT[..., :4]).view(x.size(0), -1)


def test_forms_of_weights_are_no_part_of_the_gemm() -> None:
    answer = traced(Forms(), "w", "rank")
    assert isinstance(answer, ForwardIR), answer
    assert weights_of(answer) == ["self.w", "self.w.t()", "self.rank.t()"]  # one product by rank
    biases = [
        text_of(step.call.bias) for step in answer.statements if step.call is not None and step.call.bias is not None
    ]
    assert biases == ["self.shift"]


class Alone(nn.Module):
    """Matrices (1, K, N), one of each sample, and one that is read as it is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.out = nn.Parameter(torch.randn(1, 8, 4)), nn.Parameter(torch.randn(1, 4, 8))
        self.both = nn.Parameter(torch.randn(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        low = torch.bmm(x, self.rank.expand(batch, -1, -1))
        x = x + torch.bmm(self.out.transpose(1, 2).repeat(batch, 1, 1), low.mT).mT
        x = torch.einsum("bnd,bde->bne", x, self.both.expand(batch, 8, 8).transpose(1, 2))
        return torch.matmul(x, self.both)


def test_a_matrix_of_each_sample_that_is_one_matrix() -> None:
    answer = traced(Alone(), "rank", "out", "both")
    assert isinstance(answer, ForwardIR), answer
    assert weights_of(answer) == [
        "self.rank.squeeze(0).t()",
        "self.out.squeeze(0).t()",
        "self.both.squeeze(0)",
        "self.both.squeeze(0).t()",
    ]


class TwiceCast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = zoo.weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w.to(torch.float64).to(x.dtype))


def test_a_cast_to_another_dtype_than_a_tensors_is_not_left_out() -> None:
    answer = traced(TwiceCast(), "w")
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("'w' goes into 'to' before any GEMM")


class Residuals(nn.Module):
    """Products whose sum with something else is one call with them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = zoo.weight(8, 8), zoo.weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(x[:, 0], x[:, 1], self.w.t())
        return torch.baddbmm(x, x, self.u.expand(x.size(0), -1, -1)) + h.unsqueeze(1)


def test_a_sum_in_one_call_with_its_product_is_a_statement_of_its_own() -> None:
    answer = traced(Residuals(), "w", "u")
    assert isinstance(answer, ForwardIR), answer
    texts = [step.text() for step in answer.statements]
    product = next(text.partition(" =")[0] for text in texts if text.endswith("linear(item_1, self.w)"))
    assert f"item_cast = item.to({product}.dtype)" in texts  # as under autocast
    assert f"addmm = {product} + item_cast" in texts
    assert "x_cast = x.to(linear_rows.dtype)" in texts
    assert "baddbmm = linear_rows + x_cast" in texts


@pytest.mark.parametrize("site", ["w", "w.4", "w.0.0"])
def test_what_is_no_matrix_is_no_site(site: str) -> None:
    with pytest.raises(InputError) if site == "w.4" else nullcontext():
        answer = traced(Matrices(), site)
        assert isinstance(answer, Refused)
        reason = "'w' goes into 'getitem' before any GEMM" if site == "w" else "'w.0.0' has 1 dimensions, not 2"
        assert answer.reason.startswith(reason)


def test_linears_that_share_a_parameter_keep_their_names() -> None:
    answer = traced(Tied(), "a", "b")
    assert isinstance(answer, ForwardIR)
    assert [s.call.site for s in answer.statements if s.call] == ["a", "b"]


def test_a_linear_that_is_not_asked_for_stays_a_call() -> None:
    answer = traced(Tied(), "a")
    assert isinstance(answer, ForwardIR)
    assert [s.text() for s in answer.statements] == [
        "a = torch.nn.functional.linear(x, self.a.weight, self.a.bias)",
        "b = self.b(a)",
    ]
    assert answer.inlined == ("a",)
    assert source(answer).endswith("    return b\n")


class LinearsWeight(nn.Module):
    """F.linear on the weight of a linear that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tower.weight, self.tower.bias)


@pytest.mark.parametrize("site", ["tower", "tower.weight"])
def test_the_weight_of_a_linear_that_is_never_called(site: str) -> None:
    answer = traced(LinearsWeight(), site)
    assert isinstance(answer, ForwardIR)
    assert [s.call.site for s in answer.statements if s.call] == [site]
    assert answer.inlined == ()
