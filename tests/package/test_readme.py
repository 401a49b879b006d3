"""What the README shows is what is there; so are the policy, the code, the verbs and the mods that pages show."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from loka.cli import main
from loka.dispatch import NewModelWarning
from loka.kernels.fused import operators
from loka.zoo import small_ranker
from tests.support import markdown

REPOSITORY = markdown.REPOSITORY
README = markdown.read(REPOSITORY / "README.md")
GENERATED = markdown.read(REPOSITORY / "docs" / "generated.md")
COMMANDS = markdown.read(REPOSITORY / "docs" / "cli.md")
RESULTS = markdown.read(REPOSITORY / "docs" / "results.md")
CHART = json.loads(markdown.read(REPOSITORY / "docs" / "chart.json"))
MODS = markdown.read(REPOSITORY / "docs" / "mods.md").partition("## On a live model")[2]


def test_the_policy_is_the_shipped_one() -> None:
    (policy,) = markdown.blocks(GENERATED, "yaml")
    assert policy.rstrip() == (REPOSITORY / "policies" / "ranker.yaml").read_text(encoding="utf-8").rstrip()


def test_the_excerpts_are_in_the_generated_package() -> None:
    generated = REPOSITORY / "generated" / "ranker"
    modules, operators, kernels = markdown.blocks(GENERATED, "python")
    assert modules in (generated / "modules.py").read_text(encoding="utf-8")
    assert operators in (generated / "fused.py").read_text(encoding="utf-8")
    assert kernels in (generated / "triton_kernels.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_of_mods_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policy is planned and generated, and the lines beside it run, with a checkpoint that has nothing to lose."""
    policy = markdown.blocks(MODS, "yaml")[0]
    lines = markdown.blocks(MODS, "python")[0]
    (tmp_path / "ranker_mods.yaml").write_text(policy + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("generated"), "__path__", [str(tmp_path / "generated")])
    # Its launches are those of this test alone: the package is gone afterwards.
    monkeypatch.setattr(operators, "_cuda", dict(operators._cuda))
    assert CliRunner().invoke(main.app, ["generate", "ranker_mods.yaml"]).exit_code == 0
    model = small_ranker()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    names: dict[str, Any] = {"model": model, "state_dict": model.state_dict(), "torch": torch}
    with pytest.warns(NewModelWarning, match="no_bias .* block_norm .* hard_swish"):
        exec(lines, names)  # noqa: S102 - the page's own lines
    sys.modules.pop("generated.ranker_mods")
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.out.bias"]
    names["patch"].remove()
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.out.bias"]


def test_every_verb_is_listed_and_no_other() -> None:
    listed = re.findall(r"^\| `loka (\w+)", COMMANDS, re.MULTILINE)
    assert listed == [command.name for command in main.app.registered_commands]


def test_the_readme_is_short() -> None:
    assert README.count("\n") < 150


def test_the_chart_is_drawn_from_its_figures() -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "chart.py"))["picture"](CHART)
    assert (REPOSITORY / "docs" / "chart.svg").read_text(encoding="utf-8") == drawn, "run `make docs-chart`"
    ElementTree.fromstring(drawn)


VARIANTS = {
    "LoKA FP8": "loka-fp8",
    "LoKA without FP8": "loka-bf16",
    "torchao rowwise": "torchao-rowwise",
    "torchao tensorwise": "torchao-tensorwise",
}


def test_the_figures_of_the_chart_are_those_of_the_pages() -> None:
    for entry in CHART["speed"]["models"]:
        source = markdown.read(REPOSITORY / "docs" / entry["source"])
        for variant, speeds in entry["variants"].items():
            name = VARIANTS[variant]
            for launch, speed in zip(("loop", "reduce-overhead"), speeds, strict=True):
                (ratio,) = re.findall(
                    rf"^\| {launch} \| {name} \| [\d.]+ \| ([\d.]+) \|",
                    source.partition("### One inference")[0],
                    re.MULTILINE,
                )
                assert speed == pytest.approx(float(ratio), abs=0.0051)
    for entry in CHART["quality"]["policies"]:
        row = f"{entry['change']:+.4f} +- {entry['error']:.4f} % | {entry['pairs']} | parity |"
        assert re.search(rf"^\| `{entry['policy']}` .*{re.escape(row)}$", RESULTS, re.MULTILINE)


@pytest.mark.slow
def test_the_two_lines_are_all_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    names = {
        "model": torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()),
        "example_inputs": torch.ones(8, 64),
    }
    exec(markdown.blocks(README, "python")[0], names)  # noqa: S102 - what the page shows
    assert names["patch"].report in caplog.text


def test_the_quick_start_names_verbs_and_its_own_policy() -> None:
    (commands,) = markdown.blocks(README, "bash")
    names = {command.name for command in main.app.registered_commands}
    assert "my.apply(model)" in markdown.blocks(README, "python")[1]
    for line in commands.splitlines():
        _, verb, *rest = line.split()
        assert verb in names
        assert "policies/my.yaml" in rest
