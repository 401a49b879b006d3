"""Functions are recognised by what their statements compute, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.graph.equivalence import with_forward
from tests.support.canonical_forms import canonical as canonical_of
from tests.support.canonical_forms import forward_of, statements, templates
from tests.support.expressions import template

WIDTH = 24
NORM = "torch.nn.functional.layer_norm({0}, (24,), {1}, {2}, 1e-05)"
RMS = "torch.nn.functional.rms_norm({0}, (24,), {1}, 1e-06)"
PARAMETERS = {"weight": (WIDTH,), "bias": (WIDTH,), "scale": ()}


def canonical(*lines: str, read: tuple[str, ...] = (), width: int = WIDTH) -> list[str]:
    """The templates of the canonical statements of x and z; the last target is read outside, and those of `read`."""
    inputs = {"x": (width,), "z": (width,), "other": (5, WIDTH), "rows": (7, WIDTH)}
    named = {name for step in statements(*lines) for name in (ref.text for ref in step.operands)}
    return templates(canonical_of(lines, {n: s for n, s in inputs.items() if n in named}, PARAMETERS, read))


def written(*lines: str) -> list[str]:
    """The templates as they are written."""
    return [template(step) for step in statements(*lines)]


AFFINE = ("scaled = mul normed self.weight: {0} * {1}", "y = add scaled self.bias: {0} + {1}")
NORMS = {
    "mean and var": (
        "mean = mean x: {0}.mean(-1, keepdim=True)",
        "var = var x: {0}.var(-1, unbiased=False, keepdim=True)",
        "centred = sub x mean: {0} - {1}",
        "moved = add var: {0} + 1e-05",
        "root = sqrt moved: torch.sqrt({0})",
        "normed = truediv centred root: {0} / {1}",
    ),
    "squares": (
        "mean = mean x: torch.mean({0}, dim=-1, keepdim=True)",
        "centred = sub x mean: {0} - {1}",
        "squared = pow centred: {0} ** 2",
        "var = mean squared: {0}.mean(-1, True)",
        "moved = add var: torch.add({0}, 1e-05)",
        "root = rsqrt moved: {0}.rsqrt()",
        "normed = mul root centred: {0} * {1}",
    ),
    "torch's, without its weight": ("normed = layer_norm x: torch.nn.functional.layer_norm({0}, (24,))",),
    "in float32": (
        "wide = float x: {0}.float()",
        "plain = layer_norm wide: torch.nn.functional.layer_norm({0}, [24], None, None, 1e-05)",
        "normed = type_as plain x: {0}.type_as({1})",
    ),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_layer_norm_however_it_is_written(kind: str) -> None:
    assert canonical(*NORMS[kind], *AFFINE) == [NORM]


def test_the_weight_and_the_bias_are_told_apart() -> None:
    moved = ("moved = add normed self.bias: {0} + {1}", "y = mul moved self.weight: {0} * {1}")  # another function
    assert NORM not in canonical(*NORMS["squares"], *moved)
    swapped = ("scaled = mul self.bias normed: {0} * {1}", "y = add self.weight scaled: {0} + {1}")
    steps = canonical(*NORMS["squares"], *swapped)
    assert steps == [NORM]  # with the operands x, self.bias, self.weight


@pytest.mark.parametrize("width", [8, 16, 24, 32, 256])  # rounding looks like an eps of 1e-22 at four of them
def test_a_norm_without_eps_is_none(width: int) -> None:
    steps = (
        "squared = square x: {0}.square()",
        "var = mean squared: {0}.mean(-1, keepdim=True)",
        "root = rsqrt var: {0}.rsqrt()",
        "y = mul x root: {0} * {1}",
    )
    assert canonical(*steps, width=width) == written(*steps)


def test_an_rms_norm_of_six_statements() -> None:
    steps = (
        "wide = float x: {0}.float()",
        "squared = pow wide: {0}.pow(2)",
        "var = mean squared: {0}.mean(-1, keepdim=True)",
        "moved = add var: {0} + 1e-06",
        "root = rsqrt moved: torch.rsqrt({0})",
        "normed = mul wide root: {0} * {1}",
        "plain = type_as normed x: {0}.type_as({1})",
        "y = mul self.weight plain: {0} * {1}",
    )
    assert canonical(*steps) == [RMS]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("unbiased=False, ", ""),  # divides by n - 1
        ("var(-1", "var(-2"),  # another dimension
        ("{0} + 1e-05", "{0} + 1.0"),  # no norm's eps
        ("{0} / {1}", "{0} * {1}"),
        ("moved = add var: {0} + 1e-05", "moved = clamp var: {0}.clamp(min=1e-05)"),  # no eps where var is larger
        ("{0} - {1}", "torch.sub({0}, {1}, alpha=2)"),
    ],
)
def test_what_is_nearly_a_norm_is_none(old: str, new: str) -> None:
    steps = [line.replace(old, new) for line in NORMS["mean and var"]]
    assert steps != list(NORMS["mean and var"])
    assert NORM not in canonical(*steps, *AFFINE)


@pytest.mark.parametrize("eps", ["1e-05", "1e-03"])
def test_an_eps_outside_of_the_root_is_none_of_a_norm(eps: str) -> None:
    statistics = ("mean = mean x: {0}.mean(-1, keepdim=True)", "centred = sub x mean: {0} - {1}")
    inside = ("var = var x: {0}.var(-1, unbiased=False, keepdim=True)", f"moved = add var: {{0}} + {eps}")
    outside = ("std = std x: {0}.std(-1, unbiased=False, keepdim=True)", f"root = add std: {{0}} + {eps}")
    last = "normed = truediv centred root: {0} / {1}"
    wanted = [NORM.replace("1e-05", str(float(eps)))]
    assert canonical(*statistics, *inside, "root = sqrt moved: {0}.sqrt()", last, *AFFINE) == wanted
    assert not any("norm" in each for each in canonical(*statistics, *outside, last, *AFFINE))


@pytest.mark.parametrize("before", ["{0}.clamp(-500, 500)", "torch.nan_to_num({0})", "{0}.clamp(max=10000.0)"])
@pytest.mark.parametrize(
    "after",
    [
        "torch.nn.functional.layer_norm({0}, (24,), {1}, {2}, 1e-05)",
        "torch.nn.functional.rms_norm({0}, (24,), {1}, 1e-06)",
        "torch.nn.functional.silu({0})",
        "torch.nn.functional.relu({0})",
    ],
)
def test_what_is_of_clamped_numbers_is_not_of_what_is_clamped(before: str, after: str) -> None:
    op = after.partition("(")[0].rpartition(".")[2]
    weights = {"layer_norm": " self.weight self.bias", "rms_norm": " self.weight"}.get(op, "")
    assert canonical(f"c = clamp x: {before}", f"y = {op} c{weights}: {after}") == [before, after]


def test_a_variance_by_moments_may_be_clamped_at_0() -> None:
    steps = (
        "mean = mean x: {0}.mean(-1, keepdim=True)",
        "squares = square x: {0}.square()",
        "moment = mean squares: {0}.mean(-1, keepdim=True)",
        "of_mean = square mean: {0}.square()",
        "raw = sub moment of_mean: {0} - {1}",
        "var = clamp raw: {0}.clamp(min=0)",
        "moved = add var: {0} + 1e-05",
        "root = rsqrt moved: {0}.rsqrt()",
        "centred = sub x mean: {0} - {1}",
        "normed = mul centred root: {0} * {1}",
    )
    assert canonical(*steps, *AFFINE) == [NORM]


def test_a_mean_that_is_read_elsewhere_is_computed_beside_the_norm() -> None:
    assert canonical(*NORMS["squares"], *AFFINE, read=("mean",)) == [NORM, "torch.mean({0}, dim=-1, keepdim=True)"]


def test_a_scale_of_no_dimension_is_no_weight() -> None:
    steps = (
        "normed = layer_norm x: torch.nn.functional.layer_norm({0}, (24,), None, None, 1e-05)",
        "y = mul normed self.scale: {0} * {1}",
    )
    assert canonical(*steps) == written(*steps)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("silu", ("gate = sigmoid x: torch.sigmoid({0})", "y = mul x gate: {0} * {1}")),
        ("silu", ("low = neg x: -{0}", "e = exp low: {0}.exp()", "d = add e: 1 + {0}", "y = truediv x d: {0} / {1}")),
        ("gelu", (
            "z = truediv x: {0} / 1.4142135623730951", "e = erf z: torch.erf({0})", "d = add e: {0} + 1.0",
            "h = mul x d: {0} * {1}", "y = mul h: 0.5 * {0}",
        )),
        ("tanh", ("z = mul x: {0} * 2", "s = sigmoid z: {0}.sigmoid()", "t = mul s: 2 * {0}", "y = sub t: {0} - 1")),
    ],
)  # fmt: skip
def test_activations_of_several_statements(name: str, lines: tuple[str, ...]) -> None:
    assert canonical(*lines) == [f"torch.{'' if name == 'tanh' else 'nn.functional.'}{name}({{0}})"]
    nearly = [
        line.replace("1.4142135623730951", "1.4").replace("sigmoid", "tanh").replace("1 +", "2 +") for line in lines
    ]
    assert len(canonical(*nearly)) == len(nearly)  # each is what it was


RELUS = {
    "where": (
        "p = gt x: {0} > 0",
        "z = zeros_like x: torch.zeros_like({0})",
        "y = where p x z: torch.where({0}, {1}, {2})",
    ),
    "threshold": ("y = threshold x: torch.nn.functional.threshold({0}, 0, 0)",),
    "product": ("p = gt x: {0} > 0", "y = mul x p: {0} * {1}"),
    # their gradients at 0 are a half or 1
    "maximum": ("z = zeros_like x: torch.zeros_like({0})", "y = maximum x z: torch.maximum({0}, {1})"),
    "max of new zeros": (
        "n = shape x: {0}.shape",
        "z = new_zeros x n: {0}.new_zeros({1})",
        "y = max z x: torch.max({0}, {1})",
    ),
    "max of one zero": (
        "d = device x: {0}.device",
        "z = zeros d: torch.zeros((), device={0})",
        "y = max x z: {0}.max({1})",
    ),
    "clamp": ("y = clamp x: {0}.clamp(min=0)",),
    "clip": ("y = clip x: torch.clip({0}, 0.0, None)",),
    "clamp_min": ("y = clamp_min x: torch.clamp_min({0}, 0)",),
    "from 0 on": (
        "p = ge x: {0} >= 0",
        "z = zeros_like x: torch.zeros_like({0})",
        "y = where p x z: torch.where({0}, {1}, {2})",
    ),
}
NEARLY = {  # other functions
    "largest": ("y = max x: torch.max({0})",),
    "from 1 on": ("y = clamp_min x: {0}.clamp_min(1)",),
    "above a Parameter": ("y = maximum x self.bias: torch.maximum({0}, {1})",),
    "above another": ("y = maximum x z: torch.maximum({0}, {1})",),
    "below 5": ("y = clamp x: {0}.clamp(0, 5)",),
    "leaky above a Parameter": (
        "p = gt x: {0} > 0",
        "s = mul x self.bias: {0} * {1}",
        "y = where p x s: torch.where({0}, {1}, {2})",
    ),
    "kinked at 1": ("p = gt x: {0} > 1", "s = mul x: {0} * 0.2", "y = where p x s: torch.where({0}, {1}, {2})"),
    "down to -5": ("c = clamp x: {0}.clamp(min=-5.0)", "y = leaky_relu c: torch.nn.functional.leaky_relu({0}, 0.2)"),
    "downwards": ("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, -0.2)",),
    "straight": ("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, 1.0)",),
    "steep": ("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, 1.5)",),
    "nowhere": ("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, float('nan'))",),
}
LEAKY = {
    "where": ("p = gt x: {0} > 0", "s = mul x: {0} * 0.2", "y = where p x s: torch.where({0}, {1}, {2})"),
    "maximum": ("s = mul x: 0.2 * {0}", "y = maximum x s: torch.maximum({0}, {1})"),
    "of magnitudes": ("m = abs x: {0}.abs()", "a = mul x: {0} * 0.6", "b = mul m: {0} * 0.4", "y = add a b: {0} + {1}"),
    "of two ReLUs": (
        "p = relu x: torch.relu({0})",
        "m = neg x: -{0}",
        "n = relu m: torch.relu({0})",
        "s = mul n: {0} * 0.2",
        "y = sub p s: {0} - {1}",
    ),
    "torch's": ("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, negative_slope=0.2, inplace=False)",),
    "twice": tuple(
        f"{y} = leaky_relu {x}: torch.nn.functional.leaky_relu({{0}}, {slope})"
        for x, y, slope in (("x", "h", 0.5), ("h", "y", 0.4))
    ),
}


@pytest.mark.parametrize("lines", RELUS.values(), ids=RELUS)
def test_relus_in_pieces(lines: tuple[str, ...]) -> None:
    assert canonical(*lines) == ["torch.nn.functional.relu({0})"]


@pytest.mark.parametrize("lines", RELUS.values(), ids=RELUS)
def test_a_relu_shows_each_nan_that_its_spelling_shows(lines: tuple[str, ...]) -> None:
    """All but `where` give NaN for NaN, as torch's ReLU does; that of `where` is 0."""
    found = canonical_of(lines, {"x": (3,)}, {})
    given = torch.tensor([[float("nan"), -1.0, 2.0]])
    hidden = any("where" in line for line in lines)
    written_nans = with_forward(nn.Module(), forward_of(lines, {"x": (3,)}))(given).isnan()
    assert written_nans.tolist() == [[not hidden, False, False]]
    assert with_forward(nn.Module(), found)(given).isnan().tolist() == [[True, False, False]]


@pytest.mark.parametrize("lines", LEAKY.values(), ids=LEAKY)
def test_leaky_relus_with_their_slope(lines: tuple[str, ...]) -> None:
    assert canonical(*lines) == ["torch.nn.functional.leaky_relu({0}, 0.2)"]


@pytest.mark.parametrize("slope", [1e-05, 0.3333333333333333, 0.999])
def test_a_slope_keeps_its_digits(slope: float) -> None:
    (found,) = canonical(f"y = leaky_relu x: torch.nn.functional.leaky_relu({{0}}, {slope})")
    assert float(found.partition(", ")[2].rstrip(")")) == pytest.approx(slope, rel=1e-11)


def test_the_slope_of_torch_is_not_said() -> None:
    assert canonical("y = leaky_relu x: torch.nn.functional.leaky_relu({0}, 0.01)") == [
        "torch.nn.functional.leaky_relu({0})"
    ]


@pytest.mark.parametrize("lines", NEARLY.values(), ids=NEARLY)
def test_what_is_nearly_a_relu_stays(lines: tuple[str, ...]) -> None:
    assert canonical(*lines) == written(*lines)


def test_a_group_norm_of_one_group_is_a_layer_norm() -> None:
    line = "y = group_norm x self.weight self.bias: torch.nn.functional.group_norm({0}, 1, {1}, {2}, 1e-05)"
    assert canonical(line) == [NORM]
    several = line.replace("{0}, 1,", "{0}, 2,")
    assert canonical(several) == written(several)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("torch.add({0}, {1})", ["{0} + {1}"]),
        ("torch.einsum('bd,bd->bd', {0}, {1})", ["{0} * {1}"]),
        ("torch.einsum('bd,be->bd', {0}, {1})", ["torch.einsum('bd,be->bd', {0}, {1})"]),
        ("torch.add(input={1}, other={0}, alpha=1)", ["{0} + {1}"]),
        ("{0}.add({1}, alpha=2)", ["{0}.add({1}, alpha=2)"]),
        ("torch.multiply({1}, {0})", ["{0} * {1}"]),
        ("torch.addcmul({0}, {0}, {1})", ["{0} * {1}", "{0} + {1}"]),
        ("torch.addcmul({0}, {0}, {1}, value=2)", ["torch.addcmul({0}, {0}, {1}, value=2)"]),
    ],
)
def test_sums_and_products(template: str, found: list[str]) -> None:
    op = template.partition("(")[0].rpartition(".")[2]
    assert canonical(f"y = {op} x z: {template}") == found


def test_sums_with_rows_that_are_broadcast() -> None:
    line = "joined = add other row: torch.add({0}, {1})"
    found = canonical_of(("row = getitem rows: {0}[:, :1]", line), {"other": (5, WIDTH), "rows": (7, WIDTH)}, {})
    assert templates(found) == ["{0}[:, :1]", "{0} + {1}"]


@pytest.mark.parametrize(
    "template",
    [
        "torch.nn.functional.gelu({0}, approximate='tanh')",
        "torch.nn.functional.softplus({0}, beta=2)",
        "torch.nn.functional.elu({0}, 0.5)",
        "torch.cumsum({0}, 1)",
        "torch.flip({0}, [1])",
        "{0}.sum(-1, keepdim=True) * {0}",
    ],
)
def test_other_functions_stay(template: str) -> None:
    assert canonical(f"y = other x: {template}") == [template]


@pytest.mark.parametrize("template", ["torch.atan2({0}, {1})", "torch.nn.functional.dropout({0}, 0.5) + {1}"])
def test_other_functions_of_two_tensors_stay(template: str) -> None:
    assert canonical(f"y = other x z: {template}") == [template]


def test_a_clamp_between_0_and_6_is_a_relu6() -> None:
    assert canonical("y = clamp x: {0}.clamp(0, 6)") == ["torch.nn.functional.relu6({0})"]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("torch.hstack([{0}, {1}])", "torch.cat([{0}, {1}], 1)"),
        ("torch.cat(({0}, {1}), axis=-2)", "torch.cat([{0}, {1}], 1)"),
        ("torch.concat([{0}, {1}], dim=1)", "torch.cat([{0}, {1}], 1)"),
    ],
)
def test_concatenations_of_rows(template: str, found: str) -> None:
    assert canonical(f"joined = cat other rows: {template}") == [found]
