"""Activations of chains by policy, in every spelling: all are found, and it is the model's own function."""

from __future__ import annotations

import copy

import pytest
import torch

from loka.plan.view.explain import explain
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make
from tests.support.models import activation_models as models

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


POLICY = (
    'version: 1\nname: {0}\nmodel: {{factory: "tests.support.models.activation_models:{0}", inputs: '
    '"tests.support.models.activation_models:rows", batch_size: 64}}\ndefaults: {{compute: {1}, fuse: always}}\n'
)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("factory", "activation"), [("tanhs", "tanh"), ("leaky_relus", "leaky_relu")])
def test_a_chain_takes_it_along_in_every_spelling(package: Make, factory: str, activation: str) -> None:
    plan, _, made = package(f"gen_{factory}", POLICY.format(factory, "keep"))
    plain: models.Activated = getattr(models, factory)()
    regions = {site.site.name: site.region for site in plan.sites if site.region}
    between = {f"between.{place}": ("linear", activation) for place in range(len(plain.between))}
    assert regions == {"first": ("linear", "layer_norm", activation), **between}
    x, dy = 3.0 * models.rows(64), torch.randn(64, 16)
    bound, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    expected = chains.gradients(plain, x, dy)
    with made.apply(bound) as patch, made.apply(compiled):
        found = chains.gradients(bound, x, dy)
        patch.verify()
        graph = chains.gradients(torch.compile(compiled, fullgraph=True, backend="aot_eager"), x, dy)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
        torch.testing.assert_close(graph[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
def test_one_with_parameters_is_left_to_the_compiler_and_ends_a_chain(package: Make) -> None:
    plan, _, made = package("gen_learned", POLICY.format("learned", "keep"))
    regions = {site.site.name: site.region for site in plan.sites}
    assert regions == {"0": ("linear", "layer_norm"), **dict.fromkeys(("3", "5", "7", "9"), ())}
    ends = [explain(plan, name).region_ends for name in ("0", "3", "5")]
    assert [words.partition(":")[0] for (words,) in ends] == [
        "prelu after it", "prelu after it", "BatchNorm '6.norm' after it",
    ]  # fmt: skip
    plain = models.learned()
    bound = copy.deepcopy(plain)
    x, dy = 3.0 * models.rows(64), torch.randn(64, 16)
    expected = chains.gradients(plain, x, dy) | dict(plain.named_buffers())
    with made.apply(bound) as patch:
        found = chains.gradients(bound, x, dy) | dict(bound.named_buffers())
        patch.verify()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
