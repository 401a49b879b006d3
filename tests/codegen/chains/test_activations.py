"""Activations of chains by policy, in every spelling: all are found, and it is the model's own function."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make
from tests.support.models import activation_models as models

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("factory", "activation"), [("tanhs", "tanh"), ("leaky_relus", "leaky_relu")])
def test_a_chain_takes_it_along_in_every_spelling(package: Make, factory: str, activation: str) -> None:
    plan, _, made = package(
        f"gen_{factory}",
        f'version: 1\nname: {factory}\nmodel: {{factory: "tests.support.models.activation_models:{factory}", inputs: '
        '"tests.support.models.activation_models:rows", batch_size: 64}\n'
        "defaults: {compute: keep, fuse: always}\n",
    )
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
