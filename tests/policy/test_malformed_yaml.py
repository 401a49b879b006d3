"""Texts that are no YAML, or YAML that a policy refuses: one problem each, at its place, with what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.mods.policy_loader import load_policy
from loka.policy.documents import MAX_BYTES, MAX_DEPTH, MAX_NODES
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
LEVELS = "abcdefghi"
BOMB = "".join(f"{c}: &{c} [{', '.join(['*' + LEVELS[i - 1]] * 9)}]\n" for i, c in enumerate(LEVELS) if i)

# what is wrong, with § before the place; what the message says
CASES: dict[str, tuple[str | bytes, str]] = {
    "empty file": ("§", "the policy is empty; it needs at least version"),
    "comment only": ("§# a policy\n", "the policy is empty"),
    "empty document": ("---\n§", "the policy is empty"),
    "a list": ("§- version: 1\n", "begin with 'version: 1'"),
    "a word": ("§ranker\n", "a policy is a mapping"),
    "two documents": (HEAD + "§---\nname: other\n", "a second document; keep one"),
    "tab as indentation": (HEAD + "defaults:\n§\tcompute: fp8\n", "replace it with spaces"),
    "tab after a colon": (HEAD + "target:§\th100\n", "replace it with spaces"),
    "duplicate key": (HEAD + "§name: again\n", "duplicate key 'name', first on line 2; keep one"),
    "duplicate key in a rule": (
        HEAD + "rules:\n  - match: a\n    compute: keep\n    §match: b\n",
        "duplicate key 'match', first on line 5",
    ),
    "python tag": (
        HEAD + "target: §!!python/object/apply:os.system [ls]\n",
        "tag !!python/object/apply:os.system is not allowed in a policy; remove it",
    ),
    "own tag": (HEAD + "target: §!device h100\n", "tag !device is not allowed"),
    "tag on a mapping": (HEAD + "defaults: §!!omap {compute: fp8}\n", "remove it"),
    "wrong core tag": (HEAD + "target: §!!int h100\n", "'h100' is no !!int; remove the tag"),
    "tag handle": (HEAD + "target: §!x!y h100\n", "a tag with an unknown handle; remove the tag"),
    "alias in its own anchor": (HEAD + "mods: &m [§*m]\n", "inside its own anchor; write the value out"),
    "alias without an anchor": (HEAD + "defaults: §*base\n", "alias *base has no anchor before it"),
    "too deep": (
        HEAD + "mods: " + "[" * (MAX_DEPTH - 1) + "§[" + "]" * MAX_DEPTH + "\n",
        "nested more than 32 levels deep",
    ),
    "brackets without end": (HEAD + "mods: " + "[" * (MAX_DEPTH - 1) + "§" + "[" * 100_000, "nested more than"),
    "open bracket": (HEAD + "rules: §[\n", "a bracket that is never closed; close it"),
    "open quote": (HEAD + 'target: §"h100\n', "a quote that is never closed; close it"),
    "two colons": (HEAD + "target: h100§: h200\n", "check the indentation"),
    "bare star": (HEAD + "rules:\n  - match: §*.mlp\n", "must be in quotes; add them"),
    "bare at sign": (HEAD + "target: §@h100\n", "must be in quotes, because of its first character"),
    "unknown escape": (HEAD + 'rules:\n  - match: "re:a\\§d"\n', "double the backslash, or use single quotes"),
    "escape out of range": (HEAD + 'target: "\\U§FFFFFFFF"\n', "out of range; correct it"),
    "escape for NUL": (HEAD + 'target: §"h100\\0"\n', "an escape for NUL"),
    "half a surrogate pair": (HEAD + 'rules: [{match: §"\\ud800"}]\n', "half a surrogate pair"),
    "merge key": (HEAD + "defaults: {§<<: {compute: fp8}}\n", "write the fields out, or use extends"),
    "a list for a key": (HEAD + "? §[a]\n: b\n", "a list or mapping is no key"),
    "a number for a key": (HEAD + "§1: b\n", "1 is no key; a key is a word"),
    "key without value": (HEAD + "§rules:\n", "rules has no value; give it one, or remove the key"),
    "item without value": (HEAD + "rules:\n  - match: a\n  -§\n", "an item without a value"),
    "NUL": (HEAD + "target: h100§\0\n", "a NUL character in the file; remove it"),
    "control character": (HEAD + "target: h100§\x07\n", "U+0007"),
    "line separator": (HEAD + "# a§\u2028b\n", "U+2028"),
    "Latin-1": (
        HEAD.encode() + b"# mod" + "§".encode() + b"\xe8le\n",
        "byte 0xe8 is not UTF-8; save the file as UTF-8",
    ),
    "UTF-16": ("§".encode() + HEAD.encode("utf-16"), "save it as UTF-8"),
    "column after a byte order mark": ("\ufeff§vresion: 1\n" + HEAD, "did you mean version?"),
    "column after wide letters": (HEAD + 'rules: [{match: a, note: "éü漢", §compte: fp8}]\n', "did you mean compute?"),
    "line after CRLF": (HEAD.replace("\n", "\r\n") + "§trget: h100\r\n", "did you mean target?"),
    "yes for true": (HEAD + "defaults: {padding: §yes}\n", "write true, or"),
    "off for text": (HEAD + "rules: [{match: §off}]\n", '"off" in quotes'),
    "no for a name": (HEAD.replace("ranker\n", "§no\n"), '"no" in quotes'),
    "octal": (HEAD.replace("}", ", batch_size: §010}"), "remove the leading zeros"),
    "infinite": (HEAD + "defaults: {amax: §.inf}\n", ".inf is not finite; give a finite number"),
    "not a number": (HEAD + "defaults: {budget: {mere: §.nan}}\n", "not finite"),
    "overflow": (HEAD + "defaults: {budget: {mere: §1e999}}\n", "too large for a number"),
    "a thousand digits": (HEAD.replace("}", f", batch_size: §{'9' * 1000}}}"), "at most 18 digits"),
}

CODES = {  # of other kinds than the form of the text
    **dict.fromkeys(("NUL", "control character", "line separator", "Latin-1", "UTF-16"), Code.FILE),
    **dict.fromkeys(("key without value", "item without value"), Code.MISSING),
    **dict.fromkeys(
        ("column after a byte order mark", "column after wide letters", "line after CRLF"), Code.UNKNOWN_KEY
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_its_place(case: str, load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    text, says = CASES[case]
    refused(load, text, CODES.get(case, Code.YAML), says)


NEAREST = [
    "# a policy\n" + HEAD, "---\n" + HEAD + "...\n", HEAD + "target:  h100\n", HEAD + "target: !!str h100\n",
    HEAD + "defaults: !!map {compute: fp8}\n", HEAD + "defaults: &base {}\nrules: [{match: a, fprop: *base}]\n",
    HEAD + "rules: [{match: a, fprop: {input: {format: e4m3}}}]\n", HEAD + "rules:\n  - match: 're:a\\d'\n",
    HEAD + 'target: "\\u0068100"\n', HEAD + 'rules: [{match: "\\u00e9"}]\n', HEAD + "? target\n: h100\n",
    HEAD + "# a b é\n", b"\xef\xbb\xbf" + HEAD.encode(), HEAD.replace("\n", "\r\n"), HEAD.replace("ranker\n", '"no"\n'),
    HEAD + 'rules: [{match: "off", note: "éü漢", compute: fp8}]\n', HEAD + "defaults: {budget: {mere: 1e9}}\n",
]  # fmt: skip


@pytest.mark.parametrize("text", NEAREST)
def test_the_nearest_texts_load(text: str | bytes, load: Callable[..., Policy]) -> None:
    assert load(text).version == 1


def test_yaml_bomb_is_stopped_at_the_alias_that_goes_over(load: Callable[..., Policy]) -> None:
    # Nine times as much on each line: the fifth line of the bomb would hold 9**6 values.
    text = HEAD + "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + BOMB
    with pytest.raises(PolicyError) as caught:
        load(text)
    (found,) = caught.value.problems
    assert found.message == f"over {MAX_NODES} values, aliases written out; use broader rules and fewer aliases"
    size, written, place = {"a": 10}, 3 + 2 + 2 + 1 + 1 + 1, None
    # The mapping, its keys and scalars so far; then each line's key, list and aliases.
    written = 1 + 6 + 2 + 1 + 10
    for number, name in enumerate(LEVELS[1:], start=5):
        written += 2
        for alias in range(9):
            written += size[LEVELS[number - 5]]
            if written > MAX_NODES and place is None:
                place = (number, len(f"{name}: &{name} [") + 4 * alias + 1)
        size[name] = 1 + 9 * size[LEVELS[number - 5]]
    assert (found.place.line, found.place.column) == place


def test_aliases_within_bounds_are_taken(load: Callable[..., Policy]) -> None:
    policy = load(HEAD + "defaults: {fprop: &g {scaling: tensorwise}, dgrad: *g, wgrad: *g}\n")
    assert sum(each.assignment.value == "tensorwise" for each in policy.rules[0].leaves) == 6


def test_a_problem_in_an_alias_is_at_the_value_and_at_the_alias_itself(
    load: Callable[..., Policy], refused: Callable[..., None]
) -> None:
    refused(load, HEAD + "defaults: {fprop: {scaling: &s rowwise}, compute: §*s}\n", Code.VALUE, "is not known")


def test_large_file_is_refused_unread(load: Callable[..., Policy]) -> None:
    assert load(HEAD + "#" * 500_000).name == "ranker"
    with pytest.raises(PolicyError, match=f"^ranker.yaml: over {MAX_BYTES} bytes"):
        load(HEAD + "#" * MAX_BYTES)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("none.yaml", "no such file; check the path"),
        (".", "is a directory; give the path of a policy"),
        ("/dev/null", "a device or a pipe, no plain file"),
        ("a\0b", "is no valid path"),
        ("x" * 5000, "cannot be read"),
    ],
)
def test_what_cannot_be_opened(path: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says) as caught:
        load_policy(path)
    assert len(str(caught.value).splitlines()) == 1


def test_language_server_comment_loads(load: Callable[..., Policy]) -> None:
    assert load("# yaml-language-server: $schema=../policy.schema.json\n" + HEAD).name == "ranker"
