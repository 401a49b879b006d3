"""What is said of mods and of planning, once and at its place."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from loka.cli.output import announce
from loka.cli.verbs import init, plan
from loka.errors import InputError
from loka.mods.adaptation import Unchanged
from loka.mods.modded_model import idle_problems
from loka.mods.policy_loader import load_policy

SHOP = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}
mods: [{use: block_norm, match: "layers.*.norm", block: 16}]
"""


@pytest.fixture(autouse=True)
def no_shipped_measurements() -> None:
    """Times decide here."""


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_reasons_that_many_things_share_are_told_once_and_first(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nname: p\nmodel: {factory: 'a:b'}\nmods: [{use: batch_small}]\n")
    (rule,) = load_policy(path).mods
    left = [Unchanged("odd", "it is odd"), *(Unchanged(f"many.{i}", "it is one of many") for i in range(3))]
    left += [Unchanged("", "all of it"), Unchanged("last", "it is last"), Unchanged("x", "it is more")]
    (wrong,) = idle_problems(rule, left, ["odd"])
    told = "'many.0', 'many.1', 'many.2': it is one of many; 'odd': it is odd; the model itself: all of it; "
    told += "and 2 more reasons"
    assert f"batch_small can change nothing of what it matches: {told}; remove the mod" in str(wrong)


@pytest.mark.parametrize("stream", [Terminal, StringIO])
def test_planning_is_announced_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, stream: type[StringIO]) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    announce("planning my.yaml")
    assert sys.stderr.getvalue() == ("planning my.yaml ...\n" if stream is Terminal else "")


def test_init_says_what_it_does_before_it_reads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(InputError, match="there is no module 'nowhere'"):
        init.command("nowhere:build", inputs=None, batch_size=64, batches=None, loss=None, name=None, out=None)
    assert sys.stderr.getvalue() == "building nowhere:build, and looking for its GEMMs ...\n"


@pytest.mark.slow
def test_plan_says_what_each_of_its_parts_does(shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.write_policy(SHOP)
    monkeypatch.setattr(sys, "stderr", Terminal())
    plan.command(shop.policy, as_json=False, all_sites=False, gains=True)
    first, second, *others = sys.stderr.getvalue().splitlines()
    assert first == "planning policies/shop.yaml ..."
    assert second == "tracing forwards, and choosing for 6 sites ..."
    assert "planning without block_norm, to say what it gains ..." in others
    assert "planning for batch size 64, to say what FP8 would bring ..." in others
