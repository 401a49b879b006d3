"""Models by policies, from the file to a step: the numbers of the model without its package, to a bound each."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make
from tests.support.models import odd_products, product_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

ROWWISE, KEPT = "compute: fp8, scaling: rowwise", "compute: keep, fuse: always"
CHAIN = f"{ROWWISE}, power_of_two: true, requantize_transpose: true, fuse: always"
RECIPES = {"transposed": CHAIN, "rowwise": ROWWISE, "tensorwise": "compute: fp8, scaling: tensorwise"}


@dataclass(frozen=True)
class Case:
    """A model of a module by a policy: relative errors in the norm of its output and of each gradient."""

    model: str
    inputs: str
    defaults: str
    output: float
    gradient: float | None = None  # None: that backward runs every planned GEMM
    rows: int = 16
    module: str = odd_products.__name__
    extra: str = ""  # more of the policy
    fp8: int | None = None  # sites in FP8; None: all
    frozen: float | None = None  # the output's, for frozen weights
    compiled: bool = False  # eager and compiled steps have the same bits
    autocast: bool = False  # has the dtype of the model
    text: tuple[str, ...] = ()  # in modules.py
    reason: str = ""  # of what a mod leaves


SPLIT = "mods: [{use: fuse_interaction}]\n"
PART = "x^T @ rank of its mixing layer is a part of a larger product: multiply by rank alone"
PRODUCTS = {"crosses": 12, "matrices": 6, "kernels": 5, "convolved": 4, "folded": 3}
CASES = {
    **{
        f"residual-{name}": Case("Residual", "rows", RECIPES[name], 0.1, autocast=True)
        for name in ("rowwise", "transposed")
    },
    **{
        model: Case(model, "matrices", CHAIN, 0.15, rows=8)
        for model in ("matrix_first", "convolution", "viewed_inside")
    },
    **{
        f"twice-{form}-{name}": Case(form, "rows", defaults, limit, limit, 9, compiled=True, fp8=sites)
        for form, called in (("linear", 2), ("norm", 3), ("around", 2), ("tied", 3))
        for name, defaults, limit, sites in (("fp8", CHAIN, 0.35, called), ("kept", KEPT, 1e-5, 0))
    },
    "split-kept": Case(
        "SplitMix", "embeddings", ROWWISE, 0.12, 0.2, 33, fp8=2, text=("torch.split(",), reason=PART,
        extra=f"rules: [{{match: both, compute: keep}}]\n{SPLIT}",
    ),
    "split-fp8": Case(
        "SplitMix", "embeddings", ROWWISE, 0.12, 0.2, 33, fp8=3, text=("torch.split(",), extra=SPLIT, reason=PART
    ),
    **{
        f"{model}-{name}": Case(
            model, f"{model}_inputs", defaults, 0.2, 0.2, 33, product_models.__name__, fp8=sites, frozen=0.12,
            extra="rules: [{match: {max_n: 8}, compute: keep, optional: true}]\n",
        )
        for model, sites in PRODUCTS.items()
        for name, defaults in RECIPES.items()
        if name == "transposed" or (model in ("crosses", "kernels")) == (name == "rowwise")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_numbers_of_the_model(package: Make, name: str) -> None:
    case = CASES[name]
    plan, files, generated = package(
        f"gen_numbers_{name.replace('-', '_')}",
        f'version: 1\nname: numbers\nmodel: {{factory: "{case.module}:{case.model}", '
        f'inputs: "{case.module}:{case.inputs}", batch_size: 64}}\ndefaults: {{{case.defaults}}}\n{case.extra}',
    )
    assert sum(site.fp8 for site in plan.sites) == (len(plan.sites) if case.fp8 is None else case.fp8)
    assert all(text in files["modules.py"] for text in case.text)
    assert [each.reason for mod in plan.mods for each in mod.unchanged] == ([case.reason] if case.reason else [])
    models = odd_products if case.module == odd_products.__name__ else product_models
    torch.manual_seed(0)
    model = getattr(models, case.model)()
    plain = copy.deepcopy(model)
    (x,) = getattr(models, case.inputs)(case.rows)
    dy = torch.randn(plain(x).shape, generator=torch.Generator().manual_seed(2))
    expected = chains.gradients(plain, x, dy)
    with generated.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        assert list(model.state_dict()) == list(plain.state_dict())
        if case.compiled:
            compiled = chains.gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy)
            assert all(torch.equal(value, compiled[key]) for key, value in found.items())
        if case.autocast:
            with torch.autocast("cpu", torch.bfloat16):
                assert model(x).dtype == plain(x).dtype == torch.bfloat16
    assert chains.error(found["y"], expected["y"]) <= case.output
    assert found.keys() == expected.keys()
    assert plan.share_fp8 == 0 or not any(torch.equal(found[key], expected[key]) for key in ("y", "x"))
    for key, value in found.items():
        assert case.gradient is None or chains.error(value, expected[key]) <= case.gradient, key
    if case.frozen is not None:
        with generated.apply(model, mode="infer"), torch.no_grad():
            assert chains.error(model.eval()(x), expected["y"]) <= case.frozen
