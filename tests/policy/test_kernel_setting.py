"""`kernel`: field by field as every other setting, and absent from a site's history unless a rule sets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.mods.mod_settings import MOD_SCHEMAS
from loka.numerics.enums import Gemm
from loka.policy.policy_schema import json_schema
from loka.policy.problems import PolicyError
from loka.policy.settings import ANY_KERNEL, SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [SiteFacts("layers.0.mlp.0", "linear", 64, 32, 32, 0.5), SiteFacts("head.out", "linear", 64, 32, 1, 0.5)]

Resolve = Callable[..., tuple[SiteSettings, ...]]


def kernels(settings: SiteSettings) -> list[str]:
    return [settings.gemms[gemm].kernel for gemm in Gemm]


def test_without_a_rule_nothing_is_said_of_it(resolve: Resolve) -> None:
    for settings in resolve(HEAD, SITES):
        assert kernels(settings) == [ANY_KERNEL] * 3
        assert not [path for path in settings.history if path.endswith("kernel")]


def test_narrow_wins_and_later_wins(resolve: Resolve) -> None:
    rules = (
        "defaults: {kernel: fbgemm.rowwise, wgrad: {kernel: torch.scaled_mm}}\n"
        "rules:\n  - {match: 'head.*', dgrad: {kernel: auto}}\n"
    )
    layer, head = resolve(HEAD + rules, SITES)
    assert kernels(layer) == ["fbgemm.rowwise", "fbgemm.rowwise", "torch.scaled_mm"]
    assert kernels(head) == ["fbgemm.rowwise", "auto", "torch.scaled_mm"]
    last = head.history["dgrad.kernel"][-1]
    assert (last.value, last.source, last.names_one_site) == ("auto", "rule 1: head.*", True)


def test_the_schema_has_it_for_sites_and_gemms() -> None:
    found = json_schema(MOD_SCHEMAS)["$defs"]
    for name in ("SiteSetting", "RuleSetting", "FpropSetting", "DgradSetting", "WgradSetting"):
        assert "pattern" in found[name]["properties"]["kernel"]
    assert "kernel" not in found["OperandSetting"]["properties"]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("as-is", "write compute: keep"),
        ("FBGEMM", "write auto, or library.kernel"),
        ("torch.scaled_mm.fast", "write auto, or library.kernel"),
        ('""', "write auto, or library.kernel"),
        ("true", "expected text"),
    ],
)
def test_what_is_no_kernels_name(value: str, advice: str, load: Callable[..., object]) -> None:
    with pytest.raises(PolicyError, match=advice) as caught:
        load(HEAD + f"defaults: {{kernel: {value}}}\n")
    assert ":4:20: " in str(caught.value)
