"""The cascade: order, narrow over broad, provenance, and what contradicts itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.numerics.enums import Accumulation, Compute, Format, Fuse, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.policy.cascade import resolve_settings
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError
from loka.policy.settings import Budget, GemmSettings, SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [
    SiteFacts("layers.0.mlp.0", "linear", 64, 32, 32, 0.4),
    SiteFacts("layers.1.mlp.0", "linear", 64, 32, 32, 0.4),
    SiteFacts("cross.weight", "functional_linear", 64, 480, 480, 0.19),
    SiteFacts("head.out", "linear", 64, 32, 1, 0.01),
]

Resolve = Callable[..., tuple[SiteSettings, ...]]


def computes(settings: SiteSettings) -> list[str]:
    return [settings.gemms[gemm].compute.value for gemm in Gemm]


def test_untouched_sites_have_the_built_in_settings(resolve: Resolve) -> None:
    settings = resolve(HEAD, SITES)
    default = GemmSettings(Compute.AUTO, (OperandRecipe(), OperandRecipe()))
    assert len(settings) == len(SITES)
    for each in settings:
        assert each.gemms == dict.fromkeys(Gemm, default)
        assert (each.budget, each.fuse) == (Budget(), Fuse.AUTO)
        assert all(len(history) == 1 and history[0].source == "built-in" for history in each.history.values())


def test_the_example_of_the_design(resolve: Resolve) -> None:
    settings = resolve(
        HEAD + "defaults:\n  compute: auto\n  budget: {mere: 0.2, sqnr_db: 24, min_speedup: 1.05}\nrules:\n"
        '  - match: "layers.*.mlp.*"\n    fprop: {format: e4m3, scaling: rowwise}\n    wgrad: {compute: keep}\n'
        "  - match: {kind: linear, max_n: 16}\n    compute: keep\n",
        SITES,
    )
    assert [computes(each) for each in settings] == [
        ["auto", "auto", "keep"],
        ["auto", "auto", "keep"],
        ["auto", "auto", "auto"],
        ["keep", "keep", "keep"],
    ]
    history = settings[0].history["wgrad.compute"]
    assert [(each.value, each.source, each.line) for each in history] == [
        ("auto", "built-in", 0),
        ("auto", "defaults", 5),
        ("keep", "rule 1: layers.*.mlp.*", 10),
    ]
    assert settings[3].history["dgrad.compute"][-1].source == "rule 2: kind: linear, max_n: 16"
    assert settings[0].history["fprop.input.format"][-1].line == 9


def test_narrow_wins_within_a_rule_whatever_the_order_of_its_lines(resolve: Resolve) -> None:
    for rule in ("compute: keep, fprop: {compute: fp8}", "fprop: {compute: fp8}, compute: keep"):
        settings = resolve(HEAD + f"rules: [{{match: '*', {rule}}}]\n", SITES)
        assert computes(settings[0]) == ["fp8", "keep", "keep"]


def test_operand_wins_over_gemm_and_gemm_over_site(resolve: Resolve) -> None:
    rule = "dgrad: {weight: {format: e4m3}, format: e5m2}, format: e4m3, wgrad: {format: e5m2}"
    settings = resolve(HEAD + f"rules: [{{match: '*', {rule}}}]\n", SITES)[0]
    formats = {gemm: [operand.format for operand in settings.gemms[gemm].operands] for gemm in Gemm}
    assert formats == {
        Gemm.FPROP: [Format.E4M3, Format.E4M3],
        Gemm.DGRAD: [Format.E5M2, Format.E4M3],
        Gemm.WGRAD: [Format.E5M2, Format.E5M2],
    }
    written = [each.value for each in settings.history["dgrad.weight.format"]]
    assert written == ["e4m3", "e4m3", "e5m2", "e4m3"]  # built in, site, GEMM, operand


def test_later_site_wide_compute_resets_the_gemms(resolve: Resolve) -> None:
    text = "rules:\n  - {match: '*', compute: keep, fprop: {compute: fp8}}\n  - {match: 'layers.*', compute: fp8}\n"
    settings = resolve(HEAD + text, SITES)
    assert computes(settings[0]) == ["fp8", "fp8", "fp8"]
    assert computes(settings[2]) == ["fp8", "keep", "keep"]


def test_a_later_rule_sets_only_what_it_names(resolve: Resolve) -> None:
    text = (
        "defaults: {accumulation: fast, padding: false, fuse: never, power_of_two: true}\n"
        "rules:\n  - {match: '*', compute: fp8, scaling: tensorwise}\n"
        "  - {match: 'head.*', accumulation: precise, budget: {sqnr_db: 30}}\n"
    )
    settings = resolve(HEAD + text, SITES)[3]
    gemm = settings.gemms[Gemm.DGRAD]
    assert (gemm.compute, gemm.accumulation, gemm.padding) == (Compute.FP8, Accumulation.PRECISE, False)
    assert gemm.operands == (OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True),) * 2
    assert (settings.fuse, settings.budget) == (Fuse.NEVER, Budget(sqnr_db=30.0))


def test_blockwise_is_128x128_for_weights_and_1x128_for_the_others(resolve: Resolve) -> None:
    settings = resolve(HEAD + "defaults: {scaling: blockwise}\n", SITES)[0]
    one, square = Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128
    scalings = {gemm: tuple(operand.scaling for operand in settings.gemms[gemm].operands) for gemm in Gemm}
    assert scalings == {Gemm.FPROP: (one, square), Gemm.DGRAD: (one, square), Gemm.WGRAD: (one, one)}
    assert settings.history["fprop.weight.scaling"][-1].value == "blockwise_128x128"


def test_static_range_with_its_amax_and_back(resolve: Resolve) -> None:
    text = (
        "rules:\n  - {match: '*', fprop: {input: {range: static, amax: 1e-3}}}\n"
        "  - {match: 'layers.*', range: dynamic}\n  - {match: '*.1.mlp.*', fprop: {range: static, amax: 12}}\n"
    )
    settings = resolve(HEAD + text, SITES)
    assert settings[3].gemms[Gemm.FPROP].operands[0] == OperandRecipe(range=Range.STATIC, amax=1e-3)
    assert settings[3].history["fprop.input.amax"][-1].value == "1e-3"  # as written
    assert settings[0].gemms[Gemm.FPROP].operands[0] == OperandRecipe()
    assert settings[0].history["fprop.input.amax"][-1].value == "none"
    assert settings[1].gemms[Gemm.FPROP].operands == (OperandRecipe(range=Range.STATIC, amax=12.0),) * 2


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("'layers.*'", [0, 1]),
        ("'*.mlp.*'", [0, 1]),
        ("'LAYERS.*'", []),
        ("'layers.?.mlp.[01]'", [0, 1]),
        ("'layers.1'", []),
        ("'re:layers\\.[1-9]\\..*'", [1]),
        ("'re:layers'", []),
        ("[head.out, '*.weight']", [2, 3]),
        ("{kind: functional_linear}", [2]),
        ("{min_n: 2, max_n: 100}", [0, 1]),
        ("{min_k: 480}", [2]),
        ("{min_m: 65}", []),
        ("{max_m: 64}", [0, 1, 2, 3]),
        ("{max_share: 0.19}", [2, 3]),
        ("{min_share: 0.2, name: ['*.0.*', 'head.*']}", [0]),
        ("{kind: linear, name: 're:.*out'}", [3]),
    ],
)
def test_match(match: str, names: list[int], load: Callable[..., Policy]) -> None:
    rule = load(HEAD + f"rules: [{{match: {match}, note: why}}]\n").rules[1]
    assert [index for index, site in enumerate(SITES) if rule.match.matches(site)] == names
    assert rule.note == "why"


def test_only_a_pattern_that_meets_one_site_names_it(resolve: Resolve) -> None:
    text = (
        "rules:\n  - {match: head.out, compute: fp8}\n  - {match: 'layers.*', compute: fp8}\n"
        "  - {match: {kind: functional_linear}, compute: fp8}\n"
    )
    settings = resolve(HEAD + text, SITES)
    assert settings[3].history["fprop.compute"][-1].names_one_site
    assert not settings[0].history["fprop.compute"][-1].names_one_site
    assert not settings[2].history["fprop.compute"][-1].names_one_site


def test_sites_that_the_same_rules_match_share_their_settings(resolve: Resolve) -> None:
    settings = resolve(HEAD + "rules: [{match: head.out, compute: keep}]\n", SITES)
    assert settings[0] is settings[2]
    assert settings[0] is not settings[3]


# a contradiction, with § before the place; what the message says; the nearest text without one
CONFLICTS = {
    "tensorwise by rowwise": (
        "rules: [{match: 'layers.*', fprop: {input: {scaling: §tensorwise}}}]\n",
        "fprop: no kernel multiplies input tensorwise by weight rowwise; give both tensorwise",
        "rules: [{match: 'layers.*', fprop: {scaling: tensorwise}}]\n",
    ),
    "128x128 by itself": (
        "defaults: {wgrad: {scaling: §blockwise_128x128}}\n",
        "wgrad: no kernel multiplies grad_output blockwise_128x128 by input blockwise_128x128",
        "defaults: {wgrad: {scaling: blockwise_1x128, input: {scaling: blockwise_128x128}}}\n",
    ),
    "blockwise by transposed": (
        "rules: [{match: 'layers.*', scaling: blockwise, dgrad: {requantize_transpose: §true}}]\n",
        "dgrad: no kernel multiplies grad_output blockwise_1x128 by weight transposed, which has one scale; give "
        "grad_output rowwise or tensorwise, or weight requantize_transpose: false",
        "rules: [{match: 'layers.*', scaling: blockwise, "
        "dgrad: {requantize_transpose: true, grad_output: {scaling: rowwise}}}]\n",
    ),
    "transposed by a blockwise of a later rule": (
        "defaults: {wgrad: {input: {requantize_transpose: true}}}\nrules:\n"
        "  - {match: '*.0.*', wgrad: {grad_output: {scaling: §blockwise}}}\n",
        "wgrad: no kernel multiplies grad_output blockwise_1x128 by input transposed",
        "defaults: {wgrad: {requantize_transpose: true}}\nrules:\n"
        "  - {match: '*.0.*', wgrad: {grad_output: {scaling: blockwise}}}\n",
    ),
    "later rule breaks a pair": (
        "defaults: {scaling: tensorwise}\nrules:\n  - {match: '*.0.*', dgrad: {weight: {scaling: §rowwise}}}\n",
        "(at layers.0.mlp.0)",
        "defaults: {scaling: tensorwise}\nrules:\n"
        "  - {match: '*.0.*', dgrad: {compute: keep, weight: {scaling: rowwise}}}\n",
    ),
    "static without amax": (
        "defaults: {fprop: {weight: {range: §static}}}\n",
        "fprop.weight: range: static needs a maximum: give amax, name a profile",
        "defaults: {fprop: {weight: {range: static, amax: 2}}}\n",
    ),
    "amax with a dynamic range": (
        "defaults: {fprop: {weight: {amax: §2}}}\n",
        "fprop.weight: amax is for range: static, and the range is dynamic; add range: static",
        "defaults: {fprop: {weight: {amax: 2}, range: static, input: {amax: 1}}}\n",
    ),
    "amax given with range: dynamic": (
        "defaults: {wgrad: {input: {range: dynamic, amax: §2}}}\n",
        "add range: static",
        "defaults: {wgrad: {input: {range: static, amax: 2}}}\n",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_contradictions_are_refused_at_the_offending_assignment(
    case: str, resolve: Resolve, refused: Callable[..., None]
) -> None:
    text, says, control = CONFLICTS[case]
    refused(resolve, HEAD + text, Code.CONTRADICTION, says, SITES)
    assert len(resolve(HEAD + control, SITES)) == len(SITES)


def test_a_static_range_without_amax_waits_for_the_profile_that_is_named(resolve: Resolve) -> None:
    text = HEAD + "profile: nowhere.safetensors\ndefaults: {fprop: {weight: {range: static}}}\n"
    recipe = resolve(text, SITES)[0].gemms[Gemm.FPROP].operands[1]
    assert (recipe.range, recipe.amax) == (Range.STATIC, None)


def test_a_contradiction_is_reported_once_for_all_its_sites(resolve: Resolve) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve(
            HEAD + "rules:\n  - {match: '*', fprop: {input: {scaling: tensorwise}}}\n  - {match: head.out}\n", SITES
        )
    (found,) = caught.value.problems
    assert found.message.endswith("(at layers.0.mlp.0 and 3 more)")


def test_ten_thousand_sites_and_twenty_rules_take_well_under_a_second(load: Callable[..., Policy]) -> None:
    sites = [SiteFacts(f"layers.{i}.mlp.{i % 4}", "linear", 64, 32, 32, 1e-4) for i in range(10_000)]
    rules = "".join(f"  - {{match: '*.{i % 4}', compute: fp8, wgrad: {{compute: keep}}}}\n" for i in range(20))
    policy = load(HEAD + "rules:\n" + rules)
    start = time.process_time()
    settings = resolve_settings(policy, sites)
    assert time.process_time() - start < 1.0
    assert len(settings) == 10_000
    assert len({id(each) for each in settings}) == 4


def test_operand_order_is_that_of_the_names(resolve: Resolve) -> None:
    text = "defaults: {wgrad: {grad_output: {format: e5m2}}}\n"
    first, second = resolve(HEAD + text, SITES)[0].gemms[Gemm.WGRAD].operands
    assert (first.format, second.format) == (Format.E5M2, Format.E4M3)
    assert f"wgrad.{Operand.GRAD_OUTPUT}.format" in resolve(HEAD + text, SITES)[0].history


def test_accumulation_auto_is_precise_that_may_be_fast(resolve: Resolve) -> None:
    rules = "defaults: {accumulation: auto}\nrules:\n  - {match: head.out, wgrad: {accumulation: fast}}\n"
    first, *_, head = resolve(HEAD + rules, SITES)
    found = {(each.accumulation, each.may_be_fast) for each in first.gemms.values()}
    assert found == {(Accumulation.PRECISE, True)}
    assert (head.gemms[Gemm.WGRAD].accumulation, head.gemms[Gemm.WGRAD].may_be_fast) == (Accumulation.FAST, False)
    assert first.history["fprop.accumulation"][-1].value == "auto"
