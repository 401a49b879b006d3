"""What the README shows is what is there."""

from __future__ import annotations

import re
from pathlib import Path

from loka.cli import main

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", README, re.DOTALL)


def test_the_policy_is_the_shipped_one() -> None:
    (policy,) = _blocks("yaml")
    assert policy.rstrip() == (REPOSITORY / "policies" / "ranker.yaml").read_text(encoding="utf-8").rstrip()


def test_the_excerpts_are_in_the_generated_package() -> None:
    generated = REPOSITORY / "generated" / "ranker"
    modules, kernels, script = _blocks("python")
    assert modules in (generated / "modules.py").read_text(encoding="utf-8")
    assert kernels in (generated / "triton_kernels.py").read_text(encoding="utf-8")
    assert "ranker.apply(model)" in script


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
