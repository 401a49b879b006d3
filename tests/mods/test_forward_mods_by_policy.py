"""Models whose policies ask for mods that rewrite forwards: planned, generated, applied, trained, taken off again."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.plan.serialize import from_json, to_json
from loka.plan.view.explain import explain
from loka.policy.problems import PolicyError
from tests.support.models import policy_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

KEEP = "compute: keep"
FP8 = "compute: fp8, scaling: rowwise"
CHAINS = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
CASES = {
    "experts": "{use: merge_siblings}",
    "features": "{use: batch_small}",
    "looped": "{use: batch_small}",
    "bottom": "{use: pad_alignment}",
    "both": "{use: pad_alignment}, {use: merge_siblings}, {use: batch_small, max_k: 20, max_n: 24}",
}
Made = tuple[Plan, dict[str, str], ModuleType]
Make = Callable[..., Made]


@pytest.fixture(scope="module")
def packages() -> Iterator[dict[tuple[str, ...], Made]]:
    """What `make` made for the tests of this file, by its arguments: a plan takes most of a test's time."""
    made: dict[tuple[str, ...], Made] = {}
    yield made
    for _, _, package in made.values():
        for name in [
            each for each in sys.modules if each == package.__name__ or each.startswith(f"{package.__name__}.")
        ]:
            sys.modules.pop(name)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[tuple[str, ...], Made]) -> Make:
    """The plan of a model under these mods and defaults, the files of its package, and the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def one(model: str, defaults: str, mods: str | None = None, rules: str = "") -> Made:
        mods = CASES[model] if mods is None else mods
        key = (model, defaults, mods, rules)
        if key not in packages:
            name = f"gen_mods_{model}_{len(packages)}"
            (tmp_path / "policy.yaml").write_text(
                f'version: 1\nname: {name}\nmodel: {{factory: "tests.support.models.policy_models:{model}", inputs: '
                f'"tests.support.models.policy_models:{model}_inputs", batch_size: 32}}\ndefaults: {{{defaults}}}\n'
                f"rules: [{rules}]\nmods: [{mods}]\n"
            )
            plan = make_plan("policy.yaml")
            files = render_package(plan)
            packages[key] = plan, files, write_and_import(tmp_path / name, files)
        return packages[key]

    return one


def write_and_import(folder: Path, files: dict[str, str]) -> ModuleType:
    """The package of these files; its folder's parent is on the path."""
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(folder.name)


def models(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = getattr(policy_models, name)()
    return model, getattr(policy_models, f"{name}_inputs")(9)[0]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients; inputs of no gradient need none."""
    y = model(x)
    named = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return {"y": y, **dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error, by the norms of the tensors."""
    assert found.keys() == expected.keys()
    return max(((found[n] - e).norm() / (e.norm() + 1e-9)).item() for n, e in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_in_the_models_dtype_it_is_the_same_function(make: Make, name: str) -> None:
    plan, files, package = make(name, KEEP)
    assert from_json(to_json(plan)) == plan
    assert render_package(plan) == files
    model, x = models(name)
    patched = copy.deepcopy(model)
    expected = gradients(model, x)
    with package.apply(patched) as patch:
        assert error(gradients(patched, x), expected) < 2e-6
        compiled = torch.compile(patched, fullgraph=True, backend="eager")
        assert error(gradients(compiled, x), expected) < 2e-6
        assert patched.state_dict().keys() == model.state_dict().keys()
        assert error(gradients(copy.deepcopy(patched), x), expected) < 2e-6
        patch.verify()
    with package.apply(patched, mode="infer"), torch.no_grad():
        assert (patched(x) - expected["y"]).norm() <= 2e-6 * expected["y"].norm()
    assert type(patched) is type(model)
    assert error(gradients(patched, x), expected) == 0.0


def test_a_gradient_that_is_rounding_alone_refuses_no_mod(make: Make) -> None:
    plan, _, package = make("attention", KEEP, mods="{use: merge_siblings}")
    assert [each.site for each in plan.mods[0].rewritten] == ["q+k+v"]
    model, x = models("attention")
    expected = gradients(model, x)
    rounding = 1e-6 * max(each.norm() for each in expected.values())
    assert 0 < expected.pop("k.bias").norm() < rounding
    with package.apply(model):
        found = gradients(model, x)
    assert found.pop("k.bias").norm() < rounding
    assert error(found, expected) < 2e-6


@pytest.mark.parametrize(
    ("name", "defaults"),
    [*((name, FP8) for name in CASES), ("experts", CHAINS), ("bottom", CHAINS), ("both", CHAINS)],  # batches stay as is
)
def test_in_fp8_it_errs_as_fp8_does_and_every_gemm_runs(make: Make, name: str, defaults: str) -> None:
    _, _, package = make(name, defaults)
    _, _, bare = make(name, defaults, mods="")
    model, x = models(name)
    expected = gradients(model, x)
    errors, frozen = [], []
    for each in (bare, package):
        patched = copy.deepcopy(model)
        with each.apply(patched) as patch:
            errors.append(error(gradients(patched, x), expected))
            patch.verify()
        with each.apply(patched, mode="infer") as patch, torch.no_grad():
            frozen.append((patched(x) - expected["y"]).norm() / expected["y"].norm())
            patch.verify(backward=False)
    assert errors[1] <= 1.5 * errors[0]
    assert frozen[1] <= 1.5 * frozen[0]


def test_merged_sites_stand_in_the_plan_for_their_members(make: Make) -> None:
    plan, files, _ = make("experts", FP8, mods='{use: merge_siblings, match: "experts.*"}')
    sites = {site.site.name: site.site for site in plan.sites}
    merged = sites["experts.0.0+3"]
    assert (merged.k, merged.n, merged.members) == (48, 256, tuple(f"experts.{i}.0" for i in range(4)))
    assert not set(merged.members) & set(sites)
    assert merged.share == pytest.approx(4 * sites["gates.0"].share * 64 / 4)
    assert "merged_relu = torch.nn.functional.relu(merged)" in files["modules.py"]
    assert explain(plan, "experts.2.0").found.site.name == "experts.0.0+3"


@pytest.mark.parametrize("mods", ["{use: merge_siblings}", '{use: merge_siblings, match: ["experts.*", "towers.*"]}'])
def test_experts_with_activations_in_place_are_merged_and_so_is_what_reads_them(make: Make, mods: str) -> None:
    plan, _, package = make("towers", KEEP, mods=mods)
    merged = [site.site.members for site in plan.sites if site.site.members]
    experts = tuple(f"experts.{i}.0" for i in range(3)) + (("gate",) if "match" not in mods else ())
    assert merged == [experts, ("towers.0", "towers.1")]
    model, x = models("towers")
    patched = copy.deepcopy(model)
    with package.apply(patched):
        assert error(gradients(patched, x), gradients(model, x)) < 2e-6


def test_sites_that_the_policy_treats_otherwise_are_not_merged(make: Make) -> None:
    rules = '{match: "experts.1.0", compute: keep}, {match: "gates.*", compute: keep}'
    plan, _, _ = make("experts", FP8, rules=rules)
    names = [site.site.name for site in plan.sites]
    assert "experts.0.0+experts.2.0+experts.3.0" in names
    assert "experts.1.0+gates.0+gates.1" in names


def test_one_product_is_batched_over_slices_and_stays_in_the_models_dtype(make: Make) -> None:
    plan, files, _ = make("features", FP8)
    batched = next(site for site in plan.sites if site.site.members)
    assert (batched.site.name, len(batched.site.members), batched.fp8) == ("projections.0+9", 10, False)
    assert "torch.baddbmm(biases.unsqueeze(1), x.transpose(0, 1), weights.transpose(1, 2))" in files["modules.py"]
    assert "torch.cat" not in files["modules.py"]


def test_padded_sites_have_sizes_that_the_kernels_take(make: Make) -> None:
    plan, files, _ = make("bottom", f"{FP8}, padding: false")
    sizes = {site.site.name: (site.site.k, site.site.n) for site in plan.sites}
    assert sizes == {
        "mixed": (96, 32), "bottom.0": (16, 64), "bottom.2": (64, 448), "over": (480, 96), "head": (32, 16)
    }  # fmt: skip
    assert all(gemm.fp8 for site in plan.sites for gemm in site.gemms)
    assert "torch.nn.functional.pad(self.weight, (0, 12, 0, 15))" in files["modules.py"]
    unpadded, _, _ = make("bottom", f"{FP8}, padding: false", mods="")
    whole = [site.site.name for site in unpadded.sites if all(gemm.fp8 for gemm in site.gemms)]
    assert whole == ["bottom.2"]


def test_kernels_of_chains_write_the_zeros_themselves(make: Make) -> None:
    _, files, _ = make("bottom", CHAINS)
    for sizes in ("13_to_16", "479_to_480", "20_to_32"):
        assert f"quantize_e4m3_{sizes}" in files["fused.py"]
    assert "unpadded_k=479," in files["kernels.py"]
    text = files["modules.py"]
    assert re.search(r"kernels\.\w+\(\s*cat,\s+\(self\.loka_frozen\(\d\) or self\.over\.weight,", text), text
    assert "pad(cat" not in files["modules.py"]


@pytest.mark.parametrize(
    ("model", "mods", "message"),
    [
        ("features", "{use: merge_siblings}", "merge_siblings can change nothing of what it matches: 'projec"),
        ("experts", "{use: merge_siblings, match: [bottom, 'experts.*']}", "merge_siblings cannot change 'bottom': no"),
        ("experts", "{use: batch_small, match: 'expert.*'}", "'expert.*' matches no site; did you mean 'experts.*"),
        ("bottom", "{use: pad_alignment, match: bottom.2}", "cannot change 'bottom.2': K and N are such multiples"),
        (
            "bottom",
            "{use: pad_alignment}, {use: pad_alignment, to: 32, match: over}",
            "'over': pad_alignment changes it already (mod 1: pad_alignment, at policy.yaml:",
        ),
        (
            "features",
            "{use: batch_small}, {use: pad_alignment, match: projections.3}",
            "pad_alignment cannot change 'projections.3': batch_small: it is one batched product",
        ),
        ("features", "{use: batch_small, max_k: 8}", "it is larger than max_k and max_n allow"),
    ],
)  # fmt: skip
def test_an_entry_that_gets_nothing_is_an_error_at_its_place(make: Make, model: str, mods: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        make(model, KEEP, mods=mods)
    assert message in str(raised.value)
    assert all(line.startswith("policy.yaml:6:") for line in str(raised.value).splitlines())


def test_linears_around_a_change_in_place_are_not_merged(make: Make) -> None:
    plan, _, _ = make("hidden", KEEP, mods="{use: merge_siblings, optional: true}")
    (mod,) = plan.mods
    assert mod.rewritten == ()
    assert {each.name for each in mod.unchanged} == {"a", "b"}
    assert all("changes a tensor in place: self.twist(" in each.reason for each in mod.unchanged)
    assert [site.site.name for site in plan.sites] == ["a", "b"]


def test_owners_that_cannot_be_traced_say_why_and_the_others_are_rewritten(make: Make) -> None:
    plan, _, _ = make("branching", KEEP, mods="{use: merge_siblings}")
    (mod,) = plan.mods
    assert [each.site for each in mod.rewritten] == ["inner.a+b"]
    assert {each.name for each in mod.unchanged} == {"a", "b"}
    assert all("depends on the number of rows: x.shape[0]" in each.reason for each in mod.unchanged)
    assert [binding.modules for binding in plan.bindings] == [("inner",)]


def test_what_may_change_nothing_changes_nothing(make: Make) -> None:
    plan, _, _ = make("features", FP8, mods="{use: merge_siblings, optional: true}")
    assert [mod.rewritten for mod in plan.mods] == [()]
    assert len(plan.sites) == 11


def test_the_plan_says_what_each_mod_made(make: Make) -> None:
    plan, _, _ = make("both", KEEP)
    made = {mod.use: [(each.site, each.what) for each in mod.rewritten] for mod in plan.mods}
    assert made == {
        "pad_alignment": [
            ("experts.0+experts.1+experts.2", "K 45 padded to 48, N 90 padded to 96"),
            ("head", "N 1 padded to 8"),
        ],
        "merge_siblings": [("experts.0+experts.1+experts.2", "3 linears over one input are one GEMM of K 45, N 90")],
        "batch_small": [("projections.0+8", "9 linears of K 5, N 6 over slices of one tensor are one batched product")],
    }


@pytest.mark.parametrize(
    ("defaults", "rules", "said"),
    [
        (KEEP, "", "K 20 padded to 24, N 1 padded to 8"),
        (FP8, "", "K 20 padded to 32, N 1 padded to 16"),
        (FP8, "{match: head, compute: keep}", "K 20 padded to 24, N 1 padded to 8"),
        (FP8, "{match: head, wgrad: {compute: keep}}", "K 20 padded to 32, N 1 padded to 16"),
    ],
)
def test_a_site_that_is_kept_is_padded_to_as_many_bytes(make: Make, defaults: str, rules: str, said: str) -> None:
    plan, _, _ = make("bottom", defaults, rules=rules)
    assert {each.site: each.what for mod in plan.mods for each in mod.rewritten}["head"] == said


def test_a_kept_site_of_whole_16_bytes_is_left_as_it_is(make: Make) -> None:
    mods, rule = "{use: pad_alignment, match: mixed}", "{match: mixed, compute: keep}"  # K 96, N 20
    plan, _, _ = make("bottom", FP8, mods=mods, rules=rule)
    assert [each.what for each in plan.mods[0].rewritten] == ["N 20 padded to 24"]
    with pytest.raises(PolicyError, match="cannot change 'mixed': K and N are such multiples already"):
        make("bottom", FP8, mods=mods.replace("pad_alignment", "pad_alignment, to: 8"), rules=rule)
