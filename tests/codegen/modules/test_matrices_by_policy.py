"""GEMMs by matrices that are taken from Parameters of more dimensions, by a policy: sites, texts, what is kept."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import Make
from tests.support.models import product_models as models

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

RECIPES = {
    "transposed": "scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always",
    "rowwise": "scaling: rowwise",
}


@pytest.fixture
def make(package: Make) -> Make:
    """The plan of one of `product_models` under these defaults and rules, the files of its package, and the package."""
    return lambda model, defaults, rules="": package(
        f"gen_matrices_{model}_{abs(hash((defaults, rules)))}",
        f'version: 1\nname: products\nmodel: {{factory: "{models.__name__}:{model}", '
        f'inputs: "{models.__name__}:{model}_inputs", batch_size: 64}}\ndefaults: {{compute: fp8, {defaults}}}\n'
        f"rules:\n  - {{match: {{max_n: 8}}, compute: keep, optional: true}}\n{rules}",
    )


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and all Parameters."""
    y = model(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    named = dict(model.named_parameters())
    return {"y": y.detach(), **dict(zip(("x", *named), torch.autograd.grad(y, [x, *named.values()], dy), strict=True))}


def test_a_slice_is_written_at_its_gemm_and_frozen_weights_read_it_once(make: Make) -> None:
    plan, files, _ = make("crosses", RECIPES["transposed"])
    assert not plan.skipped
    text = files["modules.py"]
    assert "(self.loka_frozen(0) or self.down[0][0].t(),)," in text  # of a ParameterList
    assert "        core = self.core.unbind()\n" in text
    assert "(self.loka_frozen(1) or core[0][0],)," in text
    assert text.count("self.up[1][1]") == 1  # where frozen weights are quantized
    assert text.count(" up[1][1]") == 1
    assert "kernels.e4m3_rowwise_pow2(self.down[1][0].t())," in text


def test_a_convolution_between_transposes_is_a_linear_in_its_region(make: Make) -> None:
    plan, files, _ = make("convolved", RECIPES["transposed"])
    assert not plan.skipped
    (rows,) = (site for site in plan.sites if site.site.name == "rows.weight")
    assert rows.region == ("linear", "layer_norm", "relu")
    matrix = r"self\.rows\.weight\.flatten\((1|-2)\)"  # either is (48, 32)
    assert re.search(rf" or {matrix}, self\.rows\.bias, self\.norm\.weight, self\.norm\.bias\)", files["modules.py"])


@pytest.mark.slow
def test_kept_matrices_give_the_model_s_own_numbers(make: Make) -> None:
    keep = '  - {match: "kernels.[12]", compute: keep}\n  - {match: "kernels.0", fprop: {compute: keep}}\n'
    plan, _, package = make("kernels", RECIPES["rowwise"], keep + "  - {match: [lift, out], compute: keep}\n")
    assert [site.site.name for site in plan.sites if site.fp8] == ["kernels.0"]
    plain = models.kernels()
    patched = copy.deepcopy(plain)
    x = models.kernels_inputs(33)[0].requires_grad_()
    expected = gradients(plain, x)
    with package.apply(patched):
        found = gradients(patched, x)
    assert torch.equal(found["y"], expected["y"])  # its dgrad and wgrad alone are in FP8
    exact = [name for name in expected if torch.equal(found[name], expected[name])]
    assert exact == ["y", "biases", "out.weight", "out.bias"]
    assert torch.equal(found["kernels"][1:], expected["kernels"][1:])
    assert not torch.equal(found["kernels"][0], expected["kernels"][0])


@pytest.mark.slow
def test_a_compiled_package_gives_the_same(make: Make) -> None:
    _, _, package = make("matrices", RECIPES["transposed"])
    model = models.matrices()
    x = models.matrices_inputs(33)[0].requires_grad_()
    with package.apply(model):
        expected = gradients(model, x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for name, value in gradients(compiled, x).items():
            key = name.removeprefix("_orig_mod.")
            assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), name
