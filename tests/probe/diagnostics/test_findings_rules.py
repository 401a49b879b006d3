"""Each rule of findings.py fires at its threshold and not just below it, and says what a policy can use."""

from __future__ import annotations

import math

import pytest
import torch
import yaml

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.mods.mod_settings import MOD_SCHEMAS
from loka.mods.protocols import Concern
from loka.mods.suggestions import Suggestion
from loka.numerics.enums import Compute, Format, Gemm, Operand, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.policy.policy_schema import policy_setting
from loka.policy.settings import Budget, GemmSettings, SiteSettings
from loka.probe.finding_evidence import BiasTrack, read_biases, track_biases
from loka.probe.findings import DOMINANT_OCTAVES, MEAN_SHARE, find, gaussian_spread, output_mean_share
from loka.probe.profile.profile import Estimate, Interval
from loka.probe.profile.summarise import summarise
from loka.probe.stats.site_stats import SiteStats
from tests.support.learned_stats import operand_of, seeded, weight_of

K, N, ROWS = 64, 32, 512

AROUND = {  # what mods could change about the site
    Concern.BIAS: Suggestion("no_bias", "tower.0"),
    Concern.INPUT_SIZES: Suggestion("norm_first", "tower.0"),
    Concern.NORM_AFTER: Suggestion("block_norm", "tower.1"),
    Concern.NORM_BEFORE: Suggestion("block_norm", "norm"),
    Concern.ACTIVATION_BEFORE: Suggestion("hard_swish", "act"),
}


def normal(rows, width, seed=0):
    return torch.randn(rows, width, generator=seeded(seed))


def site(k=K, n=N, fed_by=(), followed_by=(), bias=None, input_grad=True):
    return Site(
        "tower.0", GemmKind.LINEAR, "tower", "tower.0.weight", bias, RowCount(1), k, n, 1, 1, 1.0, input_grad,
        fed_by, followed_by, "",
    )  # fmt: skip


def settings(compute=Compute.FP8, budget=None, **gemms):
    """Every GEMM in e4m3 rowwise; `gemms` gives others by name: (first, second), each (format, scaling) or "keep"."""
    made = {}
    for gemm in Gemm:
        wanted = gemms.get(gemm.value, ((Format.E4M3, Scaling.ROWWISE),) * 2)
        recipes = tuple(OperandRecipe(*recipe) for recipe in wanted) if wanted != "keep" else (OperandRecipe(),) * 2
        made[gemm] = GemmSettings(Compute.KEEP if wanted == "keep" else compute, recipes)
    return SiteSettings(made, budget or Budget())


def weight(w):
    values = torch.zeros(257, dtype=torch.int64)
    values[128 if not w.any() else 130] = w.numel()
    row_mean = w.mean(1).double() - w.double().mean()
    return weight_of(w, row_mean=row_mean, column_mean=w.mean(0).double(), values=values)


def findings(x=None, grad=None, w=None, *, where=None, wanted=None, bias=None, estimates=(), suggestible=None):
    """What is found of a site with these calls; whatever is left out is a normal one that nothing is to be said of."""
    x = normal(ROWS, K) if x is None else x
    grad = normal(ROWS, N, 1) if grad is None else grad
    calls = x if isinstance(x, tuple) else (x,)
    k, n = calls[0].shape[1], grad.shape[1]
    w = normal(n, k, 2) / math.sqrt(k) if w is None else w
    stats = SiteStats(
        "tower.0", k, n, operand_of(Operand.INPUT, *calls), operand_of(Operand.GRAD_OUTPUT, grad), None, weight(w)
    )
    where = where or site(k, n)
    summary = summarise(stats, tuple(estimates), calls[0].shape[0])
    return find(where, stats, summary, wanted or settings(), bias, suggestible)


def asked_by(finding):
    """The mod that a remedy asks for, and what for, as the policy language reads it."""
    policy = {"version": 1, "name": "a", "model": {"factory": "a:b"}, **yaml.safe_load(finding.remedy)}
    (mod,) = policy_setting(MOD_SCHEMAS).model_validate(policy).mods
    return mod.use, mod.match


def kinds(found):
    return [each.kind for each in found]


def test_nothing_is_found_where_nothing_is_wrong():
    everything = site(fed_by=("silu",), followed_by=("layer_norm",), bias="tower.0.bias")
    bias = BiasTrack(0.5, 0.55, torch.zeros(N))
    assert findings(where=everything, bias=bias) == ()
    assert (
        findings(where=site(fed_by=("layer_norm",)), wanted=settings(fprop=[(Format.E4M3, Scaling.TENSORWISE)] * 2))
        == ()
    )


@pytest.mark.parametrize(
    ("first", "last", "fires"),
    [(0.0, 0.1, True), (0.0, 0.0999, False), (0.5, 0.75, True), (0.5, 0.749, False), (0.1, 0.19, False), (2, 1, False)],
)
def test_a_bias_diverges_where_its_norm_grows_by_both_limits(first, last, fires):
    found = findings(bias=BiasTrack(first, last, torch.zeros(N)))
    assert kinds(found) == (["bias_diverges"] if fires else [])
    if fires:
        assert f"{last:.3g}" in found[0].evidence
        assert found[0].remedy == 'in the model, build "tower.0" without its bias'
        (mended,) = findings(bias=BiasTrack(first, last, torch.zeros(N)), suggestible=AROUND)
        assert asked_by(mended) == ("no_bias", "tower.0")


def rows_with_mean(share):
    """Outputs whose row means hold `share` of the power: through an identity weight, K = N."""
    x = normal(4096, N, 3)
    x = x - x.mean(1, keepdim=True)
    power = float(x.square().mean())
    return x + math.sqrt(power * share / (1 - share))


@pytest.mark.parametrize(("share", "fires"), [(0.76, True), (0.74, False)])
def test_a_norm_cancels_where_the_output_is_mostly_row_mean(share, fires):
    x, eye = rows_with_mean(share), torch.eye(N)
    found = findings(x, w=eye, where=site(N, N, followed_by=("layer_norm", "silu")))
    assert kinds(found) == (["norm_cancels"] if fires else [])
    assert findings(x, w=eye, where=site(N, N, followed_by=("cat", "layer_norm"))) == ()
    if fires:
        assert f"{100 * share:.1f} %" in found[0].evidence
        assert found[0].remedy == 'in the model, replace the LayerNorm after "tower.0" by a block RMSNorm'
        (mended,) = findings(x, w=eye, where=site(N, N, followed_by=("layer_norm", "silu")), suggestible=AROUND)
        assert asked_by(mended) == ("block_norm", "tower.1")


@pytest.mark.parametrize(("level", "fires"), [(4.0, True), (0.1, False)])
def test_a_bias_that_is_one_constant_is_row_mean_too(level, fires):
    where = site(followed_by=("layer_norm",), bias="tower.0.bias")
    found = findings(where=where, bias=BiasTrack(6.0, 6.0, torch.full((N,), level)))
    assert kinds(found) == (["norm_cancels"] if fires else [])


def test_the_share_of_the_row_means_is_that_of_the_outputs():
    x = normal(2000, 600, 5) @ normal(600, 600, 6) + 3 * normal(1, 600, 7)  # wider than a whole covariance
    w = normal(300, 600, 8) + 0.2  # more rows than are kept
    where = site(600, 300, followed_by=("layer_norm",))
    stats = SiteStats("tower.0", 600, 300, operand_of(Operand.INPUT, x), None, None, weight(w))
    from loka.probe.finding_evidence import FindingEvidence

    evidence = FindingEvidence(where, stats, summarise(stats, (), 2000), settings(), None)
    y = x.double() @ w.double().t()
    expected = float(y.mean(1).square().mean() / y.square().mean())
    assert output_mean_share(evidence) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("mean", "fires"), [(1.8, True), (1.7, False)])
def test_a_norm_that_gives_every_row_the_same_is_found(mean, fires):
    found = findings(normal(4096, K) + mean, where=site(fed_by=("layer_norm",)))
    assert kinds(found) == (["norm_cancels"] if fires else [])
    assert kinds(findings(normal(4096, K) + mean, where=site(fed_by=("cat",)))) == []
    if fires:
        assert found[0].remedy == 'in the model, replace the LayerNorm before "tower.0" by a block RMSNorm'
        (mended,) = findings(normal(4096, K) + mean, where=site(fed_by=("layer_norm",)), suggestible=AROUND)
        assert asked_by(mended) == ("block_norm", "norm")


def outliers(octaves, width=1024):
    """Rows with one element so far above the RMS that amax / rms is beyond a Gaussian's by `octaves`."""
    x = normal(2048, width, 4)
    ratio = 2 ** (gaussian_spread(width, 0.99) + octaves)
    x[:, 0] = ratio * math.sqrt((width - 1) / (width - ratio**2))
    return x


@pytest.mark.slow
@pytest.mark.parametrize(("octaves", "fires"), [(2.2, True), (1.8, False)])
def test_an_activation_amplifies_outliers(octaves, fires):
    found = findings(outliers(octaves), where=site(1024, N, fed_by=("silu", "layer_norm")))
    assert ("activation_outliers" in kinds(found)) is fires
    assert "activation_outliers" not in kinds(findings(outliers(octaves), where=site(1024, N, fed_by=("relu",))))
    if fires:
        remedy = next(each.remedy for each in found if each.kind == "activation_outliers")
        assert remedy == 'in the model, replace the silu before "tower.0" by a hard swish'
        mended = findings(outliers(octaves), where=site(1024, N, fed_by=("silu",)), suggestible=AROUND)
        assert asked_by(next(each for each in mended if each.kind == "activation_outliers")) == ("hard_swish", "act")


@pytest.mark.parametrize("count", [1, 10, 1024, 2**20])
def test_the_spread_of_a_gaussian_is_that_of_samples(count):
    draws = max(40, 2**21 // count)
    generator = torch.Generator().manual_seed(count)
    maxima = torch.stack([torch.randn(count, generator=generator).abs().max() for _ in range(min(draws, 4000))])
    expected = float(maxima.median().log2())
    assert gaussian_spread(count, 0.5) == pytest.approx(expected, abs=0.12)


@pytest.mark.parametrize(("factor", "fires"), [(70.0, True), (58.0, False)])
@pytest.mark.parametrize("width", [64, 256])
def test_a_feature_dominates_a_scale_that_features_share(factor, fires, width):
    x = torch.sign(normal(ROWS, width))
    x[:, 5] *= factor
    found = findings(x)
    assert kinds(found) == (["feature_dominates"] if fires else [])
    blockwise = settings(fprop=((Format.E4M3, Scaling.BLOCKWISE_1X128), (Format.E4M3, Scaling.BLOCKWISE_128X128)))
    assert findings(x, wanted=blockwise) == ()
    if fires:
        assert "feature 5 reaches 70" in found[0].evidence
        if width == 256:
            rule = {"match": "tower.0", "fprop": {"scaling": "blockwise"}}
            assert yaml.safe_load(found[0].remedy) == {"rules": [rule]}
        else:
            assert found[0].remedy == 'in the model, bring the features that meet in "tower.0" to one size with a norm'
            assert asked_by(findings(x, suggestible=AROUND)[0]) == ("norm_first", "tower.0")


@pytest.mark.parametrize(("factor", "fires"), [(70.0, True), (58.0, False)])
def test_rows_dominate_a_tensorwise_scale_and_no_other(factor, fires):
    grad = torch.sign(normal(ROWS, N))
    grad[7] *= factor
    tensorwise = settings(dgrad=((Format.E4M3, Scaling.TENSORWISE),) * 2)
    found = findings(grad=grad, wanted=tensorwise)
    assert kinds(found) == (["row_dominates"] if fires else [])
    assert findings(grad=grad) == ()
    if fires:
        assert yaml.safe_load(found[0].remedy) == {"rules": [{"match": "tower.0", "dgrad": {"scaling": "rowwise"}}]}


def underflowing(share, far):
    """A gradient with `share` of its elements `far` octaves below each row's (and feature's) largest."""
    grad = torch.ones(1000, 100)
    grad.view(-1)[torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(3))[: int(share * 1e5)]] = (
        2.0**-far
    )
    return grad


@pytest.mark.parametrize(("share", "fires"), [(0.0102, True), (0.0098, False)])
def test_a_gradient_underflows_where_more_than_a_hundredth_is_lost(share, fires):
    found = findings(grad=underflowing(share, 24), wanted=settings(wgrad="keep"))
    assert kinds(found) == (["gradient_underflows"] if fires else [])
    if fires:
        assert f"{100 * share:.1f} %" in found[0].evidence
        assert yaml.safe_load(found[0].remedy)["rules"][0]["dgrad"] == {"grad_output": {"format": "e5m2"}}


@pytest.mark.parametrize(
    ("far", "remedy"), [(24, {"grad_output": {"format": "e5m2"}}), (40, {"compute": "keep"}), (15, None)]
)
def test_the_remedy_of_an_underflow_is_one_that_helps(far, remedy):
    found = findings(grad=underflowing(0.05, far))
    assert [yaml.safe_load(each.remedy)["rules"][0] for each in found] == (
        [] if remedy is None else [{"match": "tower.0", gemm: remedy} for gemm in ("dgrad", "wgrad")]
    )


def test_rowwise_is_named_where_rowwise_helps():
    grad = torch.ones(ROWS, N)
    grad[: ROWS // 2] = 2.0**-22
    tensorwise = settings(dgrad=((Format.E4M3, Scaling.TENSORWISE),) * 2, wgrad="keep")
    found = findings(grad=grad, wanted=tensorwise)
    remedies = {each.kind: yaml.safe_load(each.remedy)["rules"][0]["dgrad"] for each in found}
    assert remedies["gradient_underflows"] == {"scaling": "rowwise"}


def test_non_finite_elements_are_found_and_poison_nothing():
    bad = normal(ROWS, K)
    bad[3, 4], bad[9, 1] = math.nan, -math.inf
    (found,) = findings((normal(ROWS, K, 8), bad))
    assert found.kind == "nonfinite"
    assert found.evidence == "input: NaN or infinite elements in 1 of 2 calls, 2 in the sampled rows"


def test_an_operand_that_is_always_zero_is_found():
    (found,) = findings(grad=torch.zeros(ROWS, N))
    assert (found.kind, found.evidence[:35]) == ("always_zero", "grad_output: every element was zero")
    almost = torch.zeros(ROWS, N)
    almost[0, 0] = 1.0
    assert "always_zero" not in kinds(findings(grad=almost))


def test_a_site_that_never_ran_is_found_and_nothing_else_of_it():
    stats = SiteStats("tower.0", K, N, None, None, None, weight(torch.zeros(N, K)))
    (found,) = find(site(), stats, summarise(stats, (), ROWS), settings())
    assert (found.kind, yaml.safe_load(found.remedy)) == (
        "never_ran", {"rules": [{"match": "tower.0", "compute": "keep"}]}
    )  # fmt: skip


def test_a_site_whose_output_gets_no_gradient_is_found():
    stats = SiteStats("tower.0", K, N, operand_of(Operand.INPUT, normal(ROWS, K)), None, None, weight(normal(N, K)))
    (found,) = find(site(), stats, summarise(stats, (), ROWS), settings())
    assert found.kind == "never_ran"
    assert "no gradient" in found.evidence


@pytest.mark.parametrize(("rows", "fires"), [(1, True), (K, True), (K + 1, False)])
def test_too_few_rows_are_found(rows, fires):
    found = findings(normal(rows, K), normal(2 * K, N))
    assert kinds(found) == (["too_few_rows"] if fires else [])
    if fires:
        assert f"input: {rows} sampled rows of {K} features" in found[0].evidence


def estimate(gemm, mere, *recipe, sqnr=30.0):
    recipes = tuple(OperandRecipe(*each) for each in recipe or ((Format.E4M3, Scaling.ROWWISE),) * 2)
    return Estimate(gemm, recipes, Interval(*mere), Interval(sqnr, sqnr - 1, sqnr + 1), 64)


@pytest.mark.parametrize(
    ("mere", "kind"),
    [((0.22, 0.21, 0.23), "over_budget"), ((0.2, 0.19, 0.21), "undecided"), ((0.19, 0.18, 0.2), None)],
)
def test_estimates_against_the_budget_and_the_recipe_that_keeps_it(mere, kind):
    mixed = ((Format.E5M2, Scaling.ROWWISE), (Format.E4M3, Scaling.ROWWISE))
    own = estimate(Gemm.DGRAD, mere)
    assert kinds(findings(estimates=[own])) == ([kind] if kind else [])
    if kind:
        (found,) = findings(estimates=[own, estimate(Gemm.DGRAD, (0.1, 0.1, 0.1), *mixed)])
        verdict = "undecided" if kind == "undecided" else "unsafe"
        figures = f"MERE {mere[0]:.3f} [{mere[1]:.3f}, {mere[2]:.3f}] against the budget 0.2"
        assert found.evidence == f"dgrad e4m3 rowwise: {verdict} after 64 draws: {figures}"
        assert found.remedy.endswith("  # or let more draws decide: loka probe --draws 256") is (kind == "undecided")
        assert yaml.safe_load(found.remedy)["rules"][0]["dgrad"] == {
            "grad_output": {"format": "e5m2"}, "weight": {"format": "e4m3"}, "scaling": "rowwise",
        }  # fmt: skip
        (found,) = findings(estimates=[own, estimate(Gemm.WGRAD, (0.1, 0.1, 0.1))])
        assert yaml.safe_load(found.remedy)["rules"][0]["dgrad"] == {"compute": "keep"}


def test_a_recipe_that_differs_in_both_fields_is_written_as_one_mapping_an_operand():
    both = ((Format.E5M2, Scaling.BLOCKWISE_1X128), (Format.E4M3, Scaling.BLOCKWISE_128X128))
    found = findings(estimates=[estimate(Gemm.DGRAD, (1, 1, 1)), estimate(Gemm.DGRAD, (0.1, 0.1, 0.1), *both)])
    assert yaml.safe_load(found[0].remedy)["rules"][0]["dgrad"] == {
        "grad_output": {"format": "e5m2", "scaling": "blockwise_1x128"},
        "weight": {"format": "e4m3", "scaling": "blockwise_128x128"},
    }


def test_gemms_that_the_policy_keeps_are_left_alone():
    x, grad = normal(K, K), underflowing(0.5, 40)
    x[:, 5] *= 1000
    assert len(findings(x, grad, bias=BiasTrack(0, 9, torch.zeros(100)))) >= 4
    kept = settings(fprop="keep", dgrad="keep", wgrad="keep")
    assert findings(x, grad, bias=BiasTrack(0, 9, torch.zeros(100)), wanted=kept) == ()
    no_dgrad = findings(grad=grad, where=site(K, 100, input_grad=False))
    assert [yaml.safe_load(each.remedy)["rules"][0].keys() - {"match"} for each in no_dgrad] == [{"wgrad"}]


def test_biases_are_read_from_the_live_model_and_tracked():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    sites = [
        Site(f"{i}", GemmKind.LINEAR, "", f"{i}.weight", bias, RowCount(1), 4, 3, 1, 1, 1.0, True, (), (), "")
        for i, bias in enumerate(("0.bias", None, "2.bias"))
    ]
    before = read_biases(model, sites)
    assert list(before) == ["0"]
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([3.0, 0.0, 4.0]))
    tracks = track_biases(before, read_biases(model, sites))
    assert tracks["0"].last == 5.0
    assert tracks["0"].first == pytest.approx(float(before["0"].norm()))
    assert tracks["0"].values.tolist() == [3.0, 0.0, 4.0]


def test_thresholds_are_where_the_reasons_say():
    assert MEAN_SHARE == 0.75  # 1 - 0.75 of the power is half of the amplitude: one bit
    low = gaussian_spread(10**6, 0.5) - math.log2(0.0125)  # one element in a hundred of N(0, 1) is below
    assert 14.8 - low == pytest.approx(DOMINANT_OCTAVES, abs=0.7)
