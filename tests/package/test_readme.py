"""What the README shows is what is there."""

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

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", README, re.DOTALL)


def test_the_policy_is_the_shipped_one() -> None:
    policy, _ = _blocks("yaml")
    assert policy.rstrip() == (REPOSITORY / "policies" / "ranker.yaml").read_text(encoding="utf-8").rstrip()


def test_the_excerpts_are_in_the_generated_package() -> None:
    generated = REPOSITORY / "generated" / "ranker"
    modules, kernels, _, script = _blocks("python")
    assert modules in (generated / "modules.py").read_text(encoding="utf-8")
    assert kernels in (generated / "triton_kernels.py").read_text(encoding="utf-8")
    assert "ranker.apply(model)" in script


def test_the_example_of_mods_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policy is planned and generated, and the lines beside it run, with a checkpoint that has nothing to lose."""
    _, policy = _blocks("yaml")
    _, _, lines, _ = _blocks("python")
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
        exec(lines, names)  # noqa: S102 - the README's own lines
    sys.modules.pop("generated.ranker_mods")
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.out.bias"]
    names["patch"].remove()
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.out.bias"]


def test_every_verb_is_listed_and_no_other() -> None:
    listed = re.findall(r"^\| `loka (\w+)", README, re.MULTILINE)
    assert listed == [command.name for command in main.app.registered_commands]


def test_links_lead_somewhere() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_two_commands_are_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
