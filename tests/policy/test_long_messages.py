"""Messages of refused policies: bounded, however much is wrong and however long what is wrong is."""

from __future__ import annotations

import pytest

from loka.errors import LONGEST_LINE, InputError
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


def test_a_long_line_is_cut_in_its_middle():
    message = str(InputError(f"p.yaml: {'x' * 100_000}; write it anew\nnext line"))
    first, second = message.split("\n")
    assert first.startswith("p.yaml: xxx")
    assert first.endswith("xxx; write it anew")
    assert " ... " in first
    assert len(first) <= LONGEST_LINE
    assert second == "next line"
