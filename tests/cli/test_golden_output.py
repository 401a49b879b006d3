"""What plan, explain, diff and report print of a small model with measurements, a profile and mods, as a whole.

After a change that is meant: LOKA_GOLDEN=write pytest tests/cli/test_golden_output.py, and read the diff of the files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from loka.cli import output
from loka.cli.tables import plan_table
from loka.mods.policy_loader import load_policy, policy_argument
from loka.plan import planner
from loka.plan.examine import examine
from loka.plan.plan_of import plan_of
from loka.plan.planner import Planned, planned
from loka.policy.policy import Policy
from loka.probe.profile.profile_file import save
from loka.version import __version__
from tests.support.plan.plan_costs import SCALED_MM, Remembering
from tests.support.plan.shop_profile import profile_of

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).with_name("golden")
HEAD = """\
version: 1
name: NAME
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 4096}
"""
LEARNED = """\
measurements: times.jsonl
profile: profiles/shop.safetensors
defaults: {compute: auto, budget: {min_speedup: 1.0}}
rules:
- {match: head, compute: keep, note: the logit}
- {match: "layers.1.up", compute: fp8}
- {match: "layers.0.down", fprop: {input: {range: static}}}
"""
MODDED = """\
measurements: times.jsonl
execution: {mode: compiled, host_ms: 2, gpu_ms: 0.1}
defaults: {compute: fp8, power_of_two: true, requantize_transpose: true, fuse: always}
mods: [{use: no_bias, match: dense}, {use: block_norm, block: 32, note: for chains}]
"""


@pytest.fixture
def policies(shop) -> tuple[str, str]:
    """A policy with a profile, and one with mods, both with the measurements of everything that they can run."""
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 0.6, "fbgemm.rowwise": 0.55})
    paths = []
    for name, text in (("learned", LEARNED), ("modded", MODDED)):
        path = shop.folder / f"policies/{name}.yaml"
        written = HEAD.replace("NAME", name) + text
        for compute in ("auto", "fp8"):  # without the files that are not there yet
            rules = written.replace(", fprop: {input: {range: static}}", "").replace("auto", compute)
            path.write_text(re.sub("(measurements|profile): .*\n", "", rules), encoding="utf-8")
            plan_of(examine(load_policy(str(path))), None, costs)
        path.write_text(written, encoding="utf-8")
        paths.append(f"policies/{name}.yaml")
    costs.record(shop.folder / "policies/times.jsonl")
    save(shop.folder / "policies/profiles/shop.safetensors", profile_of({"layers.0.up": 0.3, "layers.1.up": 0.195}))
    return paths[0], paths[1]


def by_key(text: str) -> str:
    """JSON with a line for each key; what is long and tested elsewhere is left out."""
    found = json.loads(text)
    found.pop("plan", None)
    for operand in (found.get("evidence") or {}).get("operands", ()):
        operand["magnitudes"] = len(operand["magnitudes"])
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.items())


def test_output_as_a_whole(policies, loka, monkeypatch) -> None:
    made: dict[str, Planned] = {}

    def once(policy: str | Policy, **_: object) -> Planned:
        """Each policy is planned once for all verbs."""
        loaded = policy_argument(policy, "policy")
        if loaded.name not in made:
            made[loaded.name] = planned(loaded, gains=True, prospects=True)
        return made[loaded.name]

    monkeypatch.setattr(planner, "planned", once)
    found = {}
    for name, policy in zip(("learned", "modded"), policies, strict=True):
        found[f"{name}.plan.txt"] = loka("plan", policy).out
        found[f"{name}.plan.json"] = by_key(loka("plan", policy, "--json").out)
        for site in ("dense", "layers.0.down", "head"):
            found[f"{name}.{site}.txt"] = loka("explain", policy, site).out
    found["learned.dense.json"] = by_key(loka("explain", policies[0], "dense", "--json").out)
    found["diff.txt"] = loka("diff", *policies).out
    found["diff.json"] = by_key(loka("diff", *policies, "--json").out)
    for module in (plan_table, output):
        monkeypatch.setattr(module, "terminal_width", lambda: 80)
    found["learned.plan-80.txt"] = loka("plan", policies[0]).out
    for name, text in found.items():  # versions and sums of files change
        text = re.sub(r"\b[0-9a-f]{8,64}\b", "SUM", text.replace(__version__, "VERSION")).rstrip("\n") + "\n"
        if os.environ.get("LOKA_GOLDEN") == "write":
            (FOLDER / name).write_text(text, encoding="utf-8")
        assert text == (FOLDER / name).read_text(encoding="utf-8"), name
    assert {path.name for path in FOLDER.iterdir()} == set(found)
