"""Names of modules that would break a terminal, a table or a source file: escaped in every output."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from loka import dispatch

pytestmark = pytest.mark.slow

SCRIPT = "<script>alert(1)</script>"
NAMES = ["x\x1b[31mred", "a\nb", "[bold]q", '"""; import os', "\u202ertl", "{{ 7*7 }}", "| a |", "class", SCRIPT]
NAMES += ["x#0", "#", "a # b", "a*b", "a'b"]
MODEL = f"""
class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(13, 16)
        for name in {NAMES!r}:
            self.add_module(name, nn.Linear(16, 16))
        self.box = nn.ModuleDict({{name: nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for name in {NAMES!r}}})

    def forward(self, x):
        x = self.first(x)
        for name in {NAMES!r}:
            x = getattr(self, name)(x)
        for part in self.box.values():
            x = part(x)
        return x[:, 0]


build = Hostile
"""


@pytest.fixture
def hostile(shop, policy_text):
    with open("shopmodel.py", "a", encoding="utf-8") as file:
        file.write(MODEL)
    rules = policy_text.index("rules:")
    shop.write_policy(policy_text[:rules] + "mods: [{use: no_bias}]\n")
    return shop


def shows(text: str) -> None:
    """Every character of a text can be shown, and no name has broken a line."""
    assert {character for character in text if not character.isprintable()} <= {"\n"}
    assert not any(line.startswith(("b ", "b.", "b'", "b:")) for line in text.splitlines())


@pytest.mark.parametrize("verb", ["plan", "plan --all", "explain", "diff"])
def test_every_output_escapes_names(verb, hostile, loka):
    arguments = {
        "explain": ["explain", hostile.policy, "a\nb"],
        "diff": ["diff", hostile.policy, "policies/other.yaml"],
    }.get(verb, [*verb.split(), hostile.policy])
    (hostile.folder / "policies" / "other.yaml").write_text(
        (hostile.folder / hostile.policy).read_text().replace("compute: fp8", "compute: keep")
    )
    ran = loka(*arguments)
    assert ran.status == 0, ran.err
    shows(ran.out)
    shows(ran.err)
    assert "a\\nb" in ran.out


def test_a_page_of_html_has_names_as_text(hostile, loka):
    ran = loka("report", hostile.policy, "-o", "page.html")
    assert ran.status == 0, ran.err
    page = (hostile.folder / "page.html").read_text(encoding="utf-8")
    shows(page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "x\\x1b[31mred" in page
    assert "{{ 7*7 }}" in page


def test_json_has_the_names_as_they_are(hostile, loka):
    sites = json.loads(loka("plan", "--json", hostile.policy).out)["plan"]["sites"]
    assert set(NAMES) <= {row["site"]["name"] for row in sites}


def test_generated_code_and_a_drafted_policy_are_sources_that_can_be_read(hostile, loka):
    assert loka("generate", hostile.policy).status == 0
    drafted = loka("init", "shopmodel:build", "--inputs", "shopmodel:inputs", "-o", "policies/drafted.yaml")
    assert drafted.status == 0, drafted.err
    for path in [*(hostile.folder / "generated" / "shop").glob("*.py"), hostile.folder / "policies" / "drafted.yaml"]:
        text = path.read_text(encoding="utf-8")
        shows(text)
        if path.suffix == ".py":
            compile(text, path, "exec")
    assert loka("validate", "policies/drafted.yaml").status == 0


def test_names_of_all_kinds_are_bound_and_run(hostile, loka, monkeypatch):
    assert loka("generate", hostile.policy, "-o", "hostile_names").status == 0
    monkeypatch.syspath_prepend(str(hostile.folder))
    package, model = importlib.import_module("hostile_names"), importlib.import_module("shopmodel").build()
    package.adapt(model)
    patch = package.apply(model)
    assert set(NAMES) <= set(patch.sites)
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert max(map(len, str(error.value).splitlines())) < 500
    model(torch.randn(64, 13, requires_grad=True)).sum().backward()
    patch.verify()
    with pytest.raises(dispatch.BindError, match="is bound already: remove the first patch"):
        package.apply(model)


def test_an_error_about_a_name_is_one_line(hostile, loka):
    ran = loka("explain", hostile.policy, "no\x1b[31m\nsuch")
    assert ran.status == 2
    shows(ran.err)
