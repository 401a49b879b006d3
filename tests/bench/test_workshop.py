"""The folder that benchmarks import generated packages from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loka.bench.packages import Workshop
from loka.plan.planner import make_plan

POLICY = """\
version: 1
name: gates
model: {factory: "tests.support.models.sum_models:swiglu", inputs: "tests.support.models.sum_models:rows_of_128",
  batch_size: 64}
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
"""


@pytest.mark.slow
def test_no_two_packages_of_a_process_have_one_name(tmp_path: Path) -> None:
    policy = tmp_path / "gates.yaml"
    policy.write_text(POLICY)
    plan, names = make_plan(policy), set()
    for _ in range(2):
        with Workshop() as workshop:
            package = workshop.package(plan)
            assert sys.modules[package.__name__] is package
            names.add(package.__name__)
    assert len(names) == 2  # Dynamo keeps modules by name: a second one is "expected alias not in f_globals"
    assert names.isdisjoint(sys.modules)
