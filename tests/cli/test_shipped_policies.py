"""What ships in policies/: each loads, plans, and says what it is meant to say; schema.json is fresh."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from loka.cli.verbs.schema import schema_text
from loka.codegen import package_text
from loka.codegen.package_text import render_package
from loka.devices.targets import spec_of
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmBackward, FmForward
from loka.kernels.fused.matrix_kernels import CastTranspose, RequantizeTranspose
from loka.kernels.fused.quantization import Quantization
from loka.mods.mod_settings import MOD_SCHEMAS
from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.plan.totals import total_time
from loka.plan.view.explain import find_site
from loka.plan.view.table import group_sites, rule_names, site_groups
from loka.policy.checks import compile_pattern
from loka.probe.profile.profile import Profile, Verdict
from loka.probe.profile.profile_file import load
from tests.support.kernels.rendered_cases import write_package

FOLDER = Path(__file__).parents[2] / "policies"
POLICIES = sorted(path.name for path in FOLDER.glob("*.yaml"))


@cache
def planned(name: str) -> Plan:
    """The plan of a shipped policy, made once."""
    return make_plan(FOLDER / name)


@pytest.fixture(autouse=True)
def no_shipped_measurements():
    """What ships is planned by what ships, measurements too."""


def test_the_schema_beside_the_policies_is_fresh():
    assert (FOLDER / "schema.json").read_text(encoding="utf-8") == schema_text(), (
        "run: loka schema -o policies/schema.json"
    )
    json.loads(schema_text())


def test_these_ship():
    assert POLICIES == [
        "demo.yaml", "dlrm_dcnv2.yaml", "hstu.yaml", "mmoe.yaml", "movietweetings.yaml", "movietweetings_mods.yaml",
        "ranker.yaml", "rankmixer.yaml", "small_ranker.yaml", "wukong_mods.yaml",
    ]  # fmt: skip


# Two keep the layers whose rounding costs the most NE, and an MMoE what FP8 slows down.
LEAST = {"movietweetings.yaml": 0.82, "movietweetings_mods.yaml": 0.74, "mmoe.yaml": 0.7}
FAMILIES = ("hstu.yaml", "mmoe.yaml", "rankmixer.yaml")
USUAL = 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_shipped_policy_plans_mostly_in_fp8_without_refusals(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    plan = planned(name)
    assert plan.name == name.removesuffix(".yaml")
    assert plan.share_fp8 > LEAST.get(name, USUAL)
    assert plan.skipped == ()
    assert not any(site.fp8 for site in plan.sites if site.site.n <= 16 or site.site.k <= 16)
    assert any(site.region for site in plan.sites) == (name != "hstu.yaml")
    file = FOLDER / "profiles" / f"{plan.name}.safetensors"
    assert file.exists() == (name not in ("demo.yaml", "dlrm_dcnv2.yaml", "wukong_mods.yaml", *FAMILIES))
    if file.exists():
        is_small_and_the_evidence_for_every_fp8_gemm(file, plan)
    OF_ITS_OWN.get(name, lambda plan: None)(plan)


def is_small_and_the_evidence_for_every_fp8_gemm(file: Path, plan: Plan) -> None:
    assert file.stat().st_size < 500_000
    profile = load(file)
    assert isinstance(profile, Profile)  # the summary form
    assert profile.samples >= 20
    judged = [gemm for site in plan.sites for gemm in site.gemms if gemm.fp8]
    assert judged
    assert all(gemm.evidence is not None and gemm.evidence.verdict is Verdict.SAFE for gemm in judged)


def the_norms_and_activations_of_its_layers_are_fused(plan: Plan) -> None:
    regions = {site.site.name: site.region for site in plan.sites if site.region}
    assert regions["layers.0.fmb.0"] == ("layer_norm", "linear", "layer_norm", "silu")
    assert regions["layers.2.fmb.3"] == ("linear", "layer_norm", "silu")
    layers = next(binding for binding in plan.bindings if binding.modules == ("layers.0", "layers.1", "layers.2"))
    assert layers.name == "Layers"
    assert all(gemm.gemm in Gemm for site in plan.sites for gemm in site.gemms)


def fp8_itself_wins_and_slows_no_site(plan: Plan) -> None:
    total = total_time(plan)
    assert total.us < total.without_fp8_us < total.as_is_us
    in_fp8 = [site.timing for site in plan.sites if site.fp8]
    assert in_fp8
    assert all(timing.by_fp8 > 0.98 for timing in in_fp8)


def the_papers_mods_change_all_but_the_last_bias(plan: Plan) -> None:
    assert {each.mod for each in plan.adaptations} == {"no_bias", "block_norm", "hard_swish"}
    assert "head.out" not in [name for each in plan.adaptations if each.mod == "no_bias" for name in each.modules]
    assert all(site.timing is not None for site in plan.sites if site.fp8)
    assert {site.site.name for site in plan.sites if not site.fp8} >= {"head.out", "layers.0.rank"}
    kinds = {kind for site in plan.sites if site.fp8 for kind in site.region}
    assert kinds <= {"unflatten", "rms_norm", "flatten", "linear", "hardswish"}


OF_ITS_OWN = {
    "ranker.yaml": fp8_itself_wins_and_slows_no_site,
    "small_ranker.yaml": the_norms_and_activations_of_its_layers_are_fused,
    "wukong_mods.yaml": the_papers_mods_change_all_but_the_last_bias,
}


@cache
def kernels_of_all() -> tuple[Any, ...]:
    """Of each operator of the policies' packages the spec of the widest rows, and one that transposes as it casts."""
    specs: dict[str, Any] = {}
    for name in POLICIES:
        with patch.object(package_text, "render_all", wraps=package_text.render_all) as rendered:
            render_package(planned(name))
        for spec in rendered.call_args.args[0]:
            widest = specs.setdefault(spec.function, spec)
            if getattr(spec, "width", 0) > getattr(widest, "width", 0):
                specs[spec.function] = spec
    return *specs.values(), CastTranspose(Quantization("static"))


ARCHITECTURES = {
    "sm_90a": spec_of("h100"),
    "sm_100a": spec_of("b200"),
    "sm_103a": replace(spec_of("b200"), triton=("cuda", 103, 32)),
    "gfx942": spec_of("mi300x"),  # its FP8 is e4m3fnuz, which no plan takes: the kernels are ready for it
    "gfx950": spec_of("mi350x"),
}
CONVERTS = {"cuda": r"cvt\.rn\.satfinite\.e4m3x2\.f32", "hip": r"v_cvt_(scalef32_)?(pk|sr)_fp8_f32"}
MULTIPLIES = {"cuda": r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*", "hip": r"v_mfma_\S*"}


@pytest.mark.slow
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_for_each_architecture(architecture: str, tmp_path: Path) -> None:
    """What quantizes converts to FP8; interactions multiply 16 bits; FP8 is multiplied by torch's scaled_mm alone."""
    pytest.importorskip("triton", reason="Triton compiles kernels; this platform has none")
    from tests.support.kernels.sm90 import launches

    device = ARCHITECTURES[architecture]
    package = write_package(tmp_path / f"shipped_for_{architecture}", kernels_of_all(), device=device)
    for spec in kernels_of_all():
        texts = []
        for launch in launches(package, spec):
            binary = launch.compiled(device=device)
            assert binary.metadata.shared <= device.shared_bytes, spec.function
            texts.append(binary.asm["ptx" if device.triton[0] == "cuda" else "amdgcn"])
            # LLVM goes on without instructions of NVIDIA's that it cannot assemble for AMD.
            assert device.triton[0] == "cuda" or "inline_asm" not in binary.asm["ttir"], spec.function
        text = "\n".join(texts)
        quantizes = isinstance(spec, RequantizeTranspose) or not {"values", "values_0"}.isdisjoint(spec.results)
        assert bool(re.search(CONVERTS[device.triton[0]], text)) == quantizes, spec.function
        products = {match[0] for match in re.finditer(MULTIPLIES[device.triton[0]], text)}
        assert bool(products) == isinstance(spec, FmForward | FmBackward | DotSpec), spec.function
        assert all("bf16" in each or "kind::f16" in each for each in products), products


@pytest.mark.slow
def test_a_policy_far_from_the_checkout_plans_the_same(tmp_path, monkeypatch):
    here = planned("movietweetings.yaml")
    for name in ("movietweetings.yaml", "small_ranker.yaml", "ranker.yaml", "profiles/movietweetings.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert make_plan("movietweetings.yaml") == here


@pytest.mark.slow
def test_every_row_is_named_as_a_rule_takes_it(tmp_path: Path) -> None:
    """Names that `loka plan` prints are names that a rule takes, and `loka explain`, also those of merged sites."""
    plan = planned("mmoe.yaml")
    merged = [site.site.name for site in plan.sites if site.site.members]
    assert merged  # the experts, which read one input
    rows = group_sites(plan, True)
    names = [row.pattern.split(", ") for row in rows]
    for patterns, group in zip(names, site_groups(plan), strict=True):
        found = {name for name in rule_names(plan) for each in patterns if compile_pattern(each).fullmatch(name)}
        assert found == {name for site in group for name in site.site.rule_names}
        assert find_site(plan, patterns[0]).site.name in {site.site.name for site in group}
    rules = "".join(f"- {{match: {patterns!r}, compute: keep}}\n" for patterns in names)
    (tmp_path / "mmoe.yaml").write_text((FOLDER / "mmoe.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "p.yaml").write_text(f"extends: mmoe.yaml\nname: p\nrules:\n{rules}", encoding="utf-8")
    kept = make_plan(tmp_path / "p.yaml")
    assert [site.fp8 for site in kept.sites] == [False] * len(kept.sites)
    assert any(site.fp8 for site in plan.sites)


@pytest.mark.parametrize("path", sorted((FOLDER / "profiles").glob("*.safetensors")), ids=lambda path: path.stem)
def test_shipped_findings_name_mods_that_exist(path):
    profile = load(path)
    assert isinstance(profile, Profile)
    for finding in profile.findings:
        assert "yet" not in finding.remedy
        assert re.fullmatch(r'mods: \[\{use: (\w+), match: "[\w.]+"\}\]', finding.remedy)[1] in MOD_SCHEMAS
