"""What the README shows is what is there, and so is the example of mods in docs/mods.md."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loka.cli import main
from loka.dispatch import NewModelWarning
from loka.zoo import ranker
from tests.support import markdown

REPOSITORY = markdown.REPOSITORY
README = markdown.read(REPOSITORY / "README.md")
MODS = markdown.read(REPOSITORY / "docs" / "mods.md").partition("## On a live model")[2]


def test_the_policy_is_the_shipped_one() -> None:
    (policy,) = markdown.blocks(README, "yaml")
    assert policy.rstrip() == (REPOSITORY / "policies" / "ranker.yaml").read_text(encoding="utf-8").rstrip()


def test_the_excerpts_are_in_the_generated_package() -> None:
    generated = REPOSITORY / "generated" / "ranker"
    script, modules, kernels = markdown.blocks(README, "python")
    assert modules in (generated / "modules.py").read_text(encoding="utf-8")
    assert kernels in (generated / "triton_kernels.py").read_text(encoding="utf-8")
    assert "my.apply(model)" in script


@pytest.mark.slow
def test_the_example_of_mods_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policy is planned and generated, and the lines beside it run, with a checkpoint that has nothing to lose."""
    policy = markdown.blocks(MODS, "yaml")[0]
    lines = markdown.blocks(MODS, "python")[0]
    (tmp_path / "ranker_mods.yaml").write_text(policy + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("generated"), "__path__", [str(tmp_path / "generated")])
    assert CliRunner().invoke(main.app, ["generate", "ranker_mods.yaml"]).exit_code == 0
    model = ranker()
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
    listed = re.findall(r"^\| `loka (\w+)", README, re.MULTILINE)
    assert listed == [command.name for command in main.app.registered_commands]


def test_the_quick_start_names_verbs_and_its_own_policy() -> None:
    (commands,) = markdown.blocks(README, "bash")
    names = {command.name for command in main.app.registered_commands}
    for line in commands.splitlines():
        _, verb, *rest = line.split()
        assert verb in names
        assert "policies/my.yaml" in rest
