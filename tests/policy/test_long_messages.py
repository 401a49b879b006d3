"""Messages of refused policies: bounded, however much is wrong and however long what is wrong is."""

from __future__ import annotations

import copy

import pytest

from loka.dispatch.dispatch_errors import BindError
from loka.errors import LONGEST_LINE, Code, InputError
from loka.mods.policy_loader import load_policy
from loka.policy.problems import PolicyError

HEAD = 'version: 1\nname: a\nmodel: {factory: "a:b"}\n'


def test_of_many_problems_the_first_are_shown_and_the_rest_counted(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(HEAD + "".join(f"k{i}: 1\n" for i in range(3000)))
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert len(caught.value.problems) == 3000
    lines = str(caught.value).split("\n")
    assert lines[0].startswith(f"{path}:4:1: unknown key")
    assert lines[-1] == f"and {3000 - (len(lines) - 1)} more problems: correct these first"
    assert len(str(caught.value)) < 2000


def test_problems_with_one_reason_share_a_line_with_their_count_and_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = "- {match: a, computee: fp8}\n" * 6 + "- {match: a, fuse: no}\n"
    (tmp_path / "a.yaml").write_text(f"{HEAD}rules:\n{rules}")
    with pytest.raises(PolicyError) as caught:
        load_policy("a.yaml")
    assert [each.code for each in caught.value.problems] == [Code.UNKNOWN_KEY] * 6 + [Code.YAML]
    assert caught.value.code is Code.UNKNOWN_KEY
    assert str(caught.value).splitlines()[0] == (
        'a.yaml:5:14: unknown key "computee" in a rule; did you mean compute? [LK003] '
        "(and 5 more: a.yaml:6:14, a.yaml:7:14, a.yaml:8:14, ...)"
    )
    assert str(caught.value).count("\n") == 1


def test_a_code_ends_the_first_line_of_a_message_and_stays_in_copies():
    error = copy.deepcopy(BindError("it does not fit:", Code.OTHER_MODEL, ["a: other", "b: other"]))
    assert (str(error), error.code) == ("it does not fit [LK050]:\n  a, b: other", Code.OTHER_MODEL)
    assert (error.headline, error.problems) == ("it does not fit:", ("a: other", "b: other"))
    assert str(InputError(str(InputError("no", Code.FILE)), Code.FILE)) == "no [LK001]"
    assert InputError("no").code is None


def test_a_long_line_is_cut_in_its_middle():
    message = str(InputError(f"p.yaml: {'x' * 100_000}; write it anew\nnext line"))
    first, second = message.split("\n")
    assert first.startswith("p.yaml: xxx")
    assert first.endswith("xxx; write it anew")
    assert " ... " in first
    assert len(first) <= LONGEST_LINE
    assert second == "next line"
