"""`turned`, the old name of `requantize_transpose`: read as before, told of once, and refused beside the new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.errors import RenamedWarning
from loka.policy.policy import Policy
from loka.policy.settings import SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [SiteFacts("layers.0.mlp.0", "linear", 64, 32, 32, 0.5), SiteFacts("head.out", "linear", 64, 32, 1, 0.5)]

Resolve = Callable[..., tuple[SiteSettings, ...]]
Load = Callable[..., Policy]


@pytest.mark.parametrize(
    "written",
    [
        "turned: true",
        "dgrad: {turned: true}, wgrad: {turned: true}",
        "dgrad: {weight: {turned: true}}",
        "wgrad: {input: {turned: true}, grad_output: {turned: true}}",
        "turned: true, wgrad: {turned: false}",
    ],
)
def test_the_old_name_stands_for_the_new_one_wherever_that_may_stand(written: str, resolve: Resolve) -> None:
    text = HEAD + "defaults: {scaling: rowwise, power_of_two: true}\nrules: [{match: 'layers.*', " + written + "}]\n"
    with pytest.warns(RenamedWarning, match=r"^ranker.yaml:5:\d+: turned is called requantize_transpose now"):
        old = resolve(text, SITES)
    new = resolve(text.replace("turned", "requantize_transpose"), SITES)
    assert [settings.gemms for settings in old] == [settings.gemms for settings in new]
    assert [settings.history.keys() for settings in old] == [settings.history.keys() for settings in new]


def test_the_old_name_is_told_of_once_with_its_first_place(resolve: Resolve) -> None:
    text = (
        HEAD
        + "defaults:\n  turned: true\nrules:\n  - {match: head.out, dgrad: {turned: false}, wgrad: {turned: false}}\n"
    )
    with pytest.warns(RenamedWarning) as told:
        resolve(text, SITES)
    (warning,) = told
    assert str(warning.message) == (
        "ranker.yaml:5:3: turned is called requantize_transpose now; the old name still works (so at 2 more places)"
    )


def test_the_new_name_is_told_of_nowhere(resolve: Resolve, recwarn: pytest.WarningsRecorder) -> None:
    resolve(HEAD + "defaults: {requantize_transpose: true}\n", SITES)
    assert not [warning for warning in recwarn if issubclass(warning.category, RenamedWarning)]


@pytest.mark.parametrize(
    "defaults",
    [
        "{§turned: true, requantize_transpose: true}",
        "{requantize_transpose: false, §turned: true}",
        "{wgrad: {input: {requantize_transpose: true, §turned: true}}}",
    ],
)
def test_both_names_at_one_place_are_an_error_there(defaults: str, load: Load, refused: Callable[..., None]) -> None:
    words = "turned is the old name of requantize_transpose, which is given too; remove turned"
    refused(load, HEAD + f"defaults: {defaults}\n", words)


def test_a_base_under_the_old_name_is_overridden_under_the_new_one(resolve: Resolve) -> None:
    base = HEAD + "defaults: {scaling: rowwise, power_of_two: true, turned: true}\n"
    child = "extends: base.yaml\ndefaults: {requantize_transpose: false}\n"
    with pytest.warns(RenamedWarning, match=r"^base.yaml:4:\d+: "):
        settings = resolve({"ranker.yaml": child, "base.yaml": base}, SITES)[0]
    assert not any(recipe.transposed for gemm in settings.gemms.values() for recipe in gemm.operands)


def test_the_old_name_where_neither_may_stand_is_an_unknown_key(load: Load, refused: Callable[..., None]) -> None:
    refused(
        load, HEAD + "defaults: {fprop: {§turned: true}}\n", "write requantize_transpose site-wide, or where an operand"
    )
