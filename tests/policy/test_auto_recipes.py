"""`scaling: auto` leaves the recipe of a site open; fields of later rules narrow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.numerics.enums import Format, Gemm, Scaling
from loka.numerics.recipe import Recipe
from loka.policy.problems import PolicyError
from loka.policy.settings import SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITE = [SiteFacts("mlp.0", "linear", 64, 32, 32, 1.0)]
ROWS, PLAIN, TENSORWISE = "rowwise, powers of two, transposed copies", "rowwise", "tensorwise"

Resolve = Callable[..., tuple[SiteSettings, ...]]


def recipes(settings: SiteSettings) -> list[str]:
    return [each.recipe for each in (settings, *settings.alternatives)]


def test_three_recipes_are_open_and_the_first_is_that_of_chains(resolve: Resolve) -> None:
    (settings,) = resolve(HEAD + "defaults: {scaling: auto}\n", SITE)
    assert recipes(settings) == [ROWS, PLAIN, TENSORWISE]
    by_recipe = {each.recipe: each.gemms for each in (settings, *settings.alternatives)}
    assert Recipe.of({gemm: wanted.operands for gemm, wanted in by_recipe[ROWS].items()}).is_chain
    for label, scaling in ((PLAIN, Scaling.ROWWISE), (TENSORWISE, Scaling.TENSORWISE)):
        operands = [each for gemm in Gemm for each in by_recipe[label][gemm].operands]
        assert {(each.scaling, each.power_of_two, each.transposed) for each in operands} == {(scaling, False, False)}


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ("power_of_two: true", [ROWS]),
        ("requantize_transpose: false", [PLAIN, TENSORWISE]),
        ("wgrad: {requantize_transpose: true}", [ROWS]),
        ("fprop: {scaling: tensorwise}", [TENSORWISE]),
        ("fprop: {scaling: rowwise}", [ROWS, PLAIN]),
        ("compute: keep", [ROWS, PLAIN, TENSORWISE]),
        ("scaling: blockwise", [""]),  # no recipe that is open: what rules say holds
    ],
)
def test_later_fields_narrow_the_choice(rule: str, left: list[str], resolve: Resolve) -> None:
    (settings,) = resolve(HEAD + f"defaults: {{scaling: auto}}\nrules: [{{match: '*', {rule}}}]\n", SITE)
    assert recipes(settings) == left
    (settings,) = resolve(HEAD + f"defaults: {{{rule}}}\nrules: [{{match: '*', scaling: auto}}]\n", SITE)
    assert recipes(settings) == [ROWS, PLAIN, TENSORWISE]  # and earlier ones do not


def test_formats_are_kept_and_copies_have_those_of_their_sources(resolve: Resolve) -> None:
    (settings,) = resolve(HEAD + "defaults: {scaling: auto, dgrad: {grad_output: {format: e5m2}}}\n", SITE)
    for each in (settings, *settings.alternatives):
        assert each.gemms[Gemm.DGRAD].operands[0].format is Format.E5M2
    assert settings.gemms[Gemm.WGRAD].operands[0].format is Format.E5M2  # the copy of dgrad's


def test_the_history_names_auto_as_the_source(resolve: Resolve) -> None:
    (settings,) = resolve(HEAD + "defaults: {scaling: auto}\n", SITE)
    assert [(each.value, each.source) for each in settings.history["fprop.input.power_of_two"]] == [
        ("false", "built-in"),
        ("true", "defaults, scaling: auto"),
    ]
    assert settings.history["wgrad.input.requantize_transpose"][-1].value == "true"
    assert settings.history["scaling"][-1].line == 4


def test_auto_is_for_whole_sites(resolve: Resolve) -> None:
    with pytest.raises(PolicyError, match=r"scaling: text \"auto\" is not known; give one of tensorwise"):
        resolve(HEAD + "defaults: {fprop: {scaling: auto}}\n", SITE)
