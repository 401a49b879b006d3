"""Whatever a file holds, the loader gives a policy or a PolicyError; and `settings` alone costs no library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError

FULL = Path(__file__).with_name("full.yaml").read_text()
KEYS = sorted(set(re.findall(r"(\w+):", FULL)) | {"extends", "mods", "profile", "use", "except", "<<", ""})
WORDS = sorted(
    set(re.findall(r"[\w.*:\\()|]+", FULL)) | {"no", "~", ".nan", "1e999", "re:(", "ranker.yaml", "blockwise"}
)

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(WORDS))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
policies = st.fixed_dictionaries(
    {"version": st.just(1), "name": st.just("a"), "model": st.just({"factory": "a:b"})},
    optional=dict.fromkeys(("train", "defaults", "rules", "mods", "extends", "target", "profile"), values),
)
quiet = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(directory: Path, data: bytes) -> None:
    """Loads bytes as a policy; the only error is a PolicyError with printable lines that name a place."""
    path = directory / "ranker.yaml"
    path.write_bytes(data)
    error = None
    try:
        assert isinstance(load_policy(path), Policy)
    except PolicyError as caught:
        error = caught
    if error is not None:
        lines = str(error).split("\n")
        left = re.fullmatch(r"and (\d+) more problems: correct these first", lines[-1])
        alike = sum(int(found[1]) for line in lines if (found := re.search(r"\[LK\d+\] \(and (\d+) more: ", line)))
        assert len(lines) + alike + (int(left[1]) - 1 if left else 0) == len(error.problems) > 0
        assert all(line.isprintable() for line in lines)
        rows = re.split("\r\n|\r|\n", data.decode("utf-8", "replace").removeprefix("\ufeff"))
        for each in error.problems:
            assert 1 <= each.place.line <= len(rows)
            assert 1 <= each.place.column <= len(rows[each.place.line - 1]) + 1


@quiet
@given(data=st.binary(max_size=300))
@example(b"\xef\xbb\xbf\xff")
@example(b"a: \r\r\n\tb")
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    survives(tmp_path, data)


@quiet
@given(text=st.text(alphabet=st.sampled_from("ab1.:-?*&!%|>'\"[]{},# \n\t\\@`~<=U0x"), max_size=60))
@example('"\\U00110000"')
@example("%YAML " + "9" * 5000 + ".1\n---\na")
@example("? " * 2000)
@example("- " * 2000)
@example("a: !<tag:yaml.org,2002:int> x")
def test_any_text_in_the_letters_of_yaml(tmp_path: Path, text: str) -> None:
    survives(tmp_path, text.encode("utf-8", "surrogatepass"))


@pytest.mark.slow
@settings(quiet, max_examples=60)
@given(data=st.data())
def test_any_small_change_of_a_policy(tmp_path: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 12)))
    new = data.draw(
        st.text(max_size=4) | st.sampled_from(WORDS) | st.sampled_from(["\n", "\t", "- ", ": ", "{", "]", "&a ", "*a"])
    )
    survives(tmp_path, (FULL[:start] + new + FULL[end:]).encode("utf-8", "surrogatepass"))


@pytest.mark.slow
@settings(quiet, max_examples=60)
@given(policy=policies)
def test_any_values_for_the_keys_of_the_language(tmp_path: Path, policy: dict[str, object]) -> None:
    survives(tmp_path, json.dumps(policy, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def test_policies_that_are_drawn_at_random_are_sometimes_right(tmp_path: Path) -> None:
    # The control for the tests above: the unchanged text is a policy, and so is JSON.
    for text in (FULL, json.dumps({"version": 1, "name": "a", "model": {"factory": "a:b"}})):
        path = tmp_path / "ranker.yaml"
        path.write_text(text)
        assert load_policy(path).version == 1


@pytest.mark.parametrize("module", ["loka.policy.settings", "loka.policy"])
def test_settings_alone_import_no_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('pydantic', 'yaml', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
