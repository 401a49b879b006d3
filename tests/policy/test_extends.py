"""`extends`: merging, provenance, chains, and everything that can be wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loka.errors import Code
from loka.mods.policy_loader import load_policy
from loka.policy.documents import MAX_CHAIN, compose
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError
from loka.policy.settings import SiteFacts, SiteSettings
from loka.policy.tree import content_hash

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITE = SiteFacts("layers.0.mlp.0", "linear", 64, 32, 16, 1.0)


def test_mappings_merge_and_rules_of_the_base_come_first(resolve: Callable[..., tuple[SiteSettings, ...]]) -> None:
    files = {
        "policies/ranker.yaml": "extends: ../shared/base.yaml\nname: child\nmodel: {batch_size: 8}\n"
        "defaults: {budget: {mere: 0.1}}\nrules:\n  - match: layers.*\n    compute: keep\n",
        "shared/base.yaml": HEAD + "defaults: {compute: fp8, budget: {mere: 0.3, sqnr_db: 20}}\n"
        "rules:\n  - match: '*.mlp.*'\n    compute: fp8\n    fprop: {format: e5m2}\n",
    }
    (settings,) = resolve(files, [SITE])
    assert (settings.budget.mere, settings.budget.sqnr_db, settings.budget.min_speedup) == (0.1, 20.0, 1.05)
    computed = [(each.value, each.source, each.file, each.line) for each in settings.history["fprop.compute"]]
    assert computed == [
        ("auto", "built-in", "", 0),
        ("fp8", "defaults", "shared/base.yaml", 4),
        ("fp8", "rule 1: *.mlp.*", "shared/base.yaml", 7),
        ("keep", "rule 2: layers.*", "policies/ranker.yaml", 7),
    ]
    assert [each.file for each in settings.history["budget.mere"]] == ["", "policies/ranker.yaml"]


def test_a_profile_lies_relative_to_the_file_that_names_it(load: Callable[..., Policy]) -> None:
    files = {
        "policies/ranker.yaml": "extends: ../shared/base.yaml\nname: child\n",
        "shared/base.yaml": HEAD + "profile: profiles/a.safetensors\n",
    }
    named = load(files)
    assert named.profile == "profiles/a.safetensors"
    assert named.profile_file == Path("shared/profiles/a.safetensors")
    files["policies/ranker.yaml"] += "profile: own.safetensors\n"
    assert load(files).profile_file == Path("policies/own.safetensors")
    assert load({"policies/ranker.yaml": HEAD}).profile_file is None


def test_files_are_named_from_the_policy_wherever_it_lies(write: Callable[..., Path], tmp_path: Path) -> None:
    base = HEAD + "rules: [{match: a}]\n"
    write(
        {
            "a/b/ranker.yaml": "extends: ../mid.yaml\nname: child\n",
            "a/mid.yaml": "extends: c/base.yaml\n",
            "a/c/base.yaml": base,
        }
    )
    near, far = load_policy("a/b/ranker.yaml"), load_policy(tmp_path / "a" / "b" / "ranker.yaml")
    assert near.files == far.files
    assert [name for name, _ in near.files] == ["ranker.yaml", "../mid.yaml", "../c/base.yaml"]
    assert near.files[2][1] == content_hash(compose(base, "base.yaml")[0])
    assert (near.name, near.version, near.model.factory) == ("child", 1, "pkg.models:ranker")
    assert near.rules[1].place.file == "a/c/base.yaml"
    assert far.rules[1].place.file == str(tmp_path / "a" / "c" / "base.yaml")
    assert near.relative(near.rules[1].place.file) == far.relative(far.rules[1].place.file) == "../c/base.yaml"
    assert near.where("model.factory") == "a/c/base.yaml:3:18"
    assert near.where("name") == "a/b/ranker.yaml:2:7"


def test_required_fields_may_come_from_either(load: Callable[..., Policy]) -> None:
    train = load(
        {
            "ranker.yaml": 'extends: base.yaml\nversion: 1\nname: a\ntrain: {loss: "pkg:loss"}\n',
            "base.yaml": 'model: {factory: "pkg:a", batch_size: 7}\ntrain: {batches: "pkg:batches", batch_size: 3}\n',
        }
    ).train
    assert train is not None
    assert (train.batches, train.loss, train.batch_size) == ("pkg:batches", "pkg:loss", 3)


# what is wrong, with § before the place; what the message says
CASES: dict[str, tuple[dict[str, str], str]] = {
    "missing base": ({"ranker.yaml": HEAD + "extends: §none.yaml\n"}, "none.yaml: no such file"),
    "base that is a directory": ({"ranker.yaml": HEAD + "extends: §dir\n", "dir/x": "x"}, "is a directory"),
    "itself": ({"ranker.yaml": HEAD + "extends: §ranker.yaml\n"}, "remove one of the two"),
    "itself by another path": ({"a/ranker.yaml": HEAD + "extends: §../a/./ranker.yaml\n"}, "extends this file in turn"),
    "cycle of three": (
        {"ranker.yaml": HEAD + "extends: b.yaml\n", "b.yaml": "extends: c.yaml\n", "c.yaml": "extends: §ranker.yaml\n"},
        "extends this file in turn",
    ),
    "chain without end": (
        {"ranker.yaml": HEAD + "extends: 1.yaml\n"}
        | {f"{i}.yaml": f"extends: {'§' if i == MAX_CHAIN - 1 else ''}{i + 1}.yaml\n" for i in range(1, 40)},
        "more than 16 files in a chain",
    ),
    "absolute": ({"ranker.yaml": HEAD + "extends: §/etc/base.yaml\n"}, "must be relative"),
    "backslashes": ({"ranker.yaml": HEAD + "extends: §..\\base.yaml\n"}, "forward slashes"),
    "number": ({"ranker.yaml": HEAD + "extends: §3\n"}, "give the path of one policy"),
    "empty": ({"ranker.yaml": HEAD + "extends: §''\n"}, "give the path of one policy"),
    "broken base": (
        {"ranker.yaml": "version: 1\nextends: base.yaml\n", "base.yaml": "name: §[\n"},
        "a bracket that is never closed",
    ),
    "wrong value in the base": (
        {"ranker.yaml": "extends: base.yaml\n", "base.yaml": HEAD + "defaults:\n  compute: §fp4\n"},
        "did you mean fp8?",
    ),
    "wrong value in the base, overridden": (
        {
            "ranker.yaml": "extends: base.yaml\ndefaults: {compute: keep}\n",
            "base.yaml": f"{HEAD}defaults: {{compute: §fp4}}\n",
        },
        "did you mean fp8?",
    ),
    "wrong type in the base of the base, overridden": (
        {
            "ranker.yaml": "extends: base.yaml\ndefaults: {budget: {mere: 0.1}}\n",
            "base.yaml": "extends: root.yaml\ndefaults: {compute: fp8}\n",
            "root.yaml": HEAD + "defaults: {budget: §0.2}\n",
        },
        "budget: expected a mapping of keys to values, found the number 0.2",
    ),
    "another version of the base, overridden": (
        {"ranker.yaml": f"extends: base.yaml\n{HEAD}", "base.yaml": "version: §2\n"},
        "this LoKA reads version 1",
    ),
    "rules of the base are no list": (
        {"ranker.yaml": "extends: base.yaml\nrules: [{match: a}]\n", "base.yaml": HEAD + "rules: §{match: a}\n"},
        "begin each item with '- '",
    ),
    "rules of the policy are no list": (
        {"ranker.yaml": "extends: base.yaml\nrules: §a\n", "base.yaml": HEAD + "rules: [{match: a}]\n"},
        "expected a list",
    ),
    "mods of the base": (
        {"ranker.yaml": "extends: base.yaml\n", "base.yaml": HEAD + "mods: [{use: §no_bais}]\n"},
        "did you mean no_bias?",
    ),
}

CODES = {
    **dict.fromkeys(list(CASES)[: list(CASES).index("broken base")], Code.EXTENDS),  # the field itself is wrong
    "broken base": Code.YAML,
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_its_place(case: str, load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    files, says = CASES[case]
    refused(load, files, CODES.get(case, Code.VALUE), says)


def test_a_chain_may_have_sixteen_files(load: Callable[..., Policy]) -> None:
    chain = {f"{i}.yaml": f"extends: {i + 1}.yaml\n" for i in range(1, MAX_CHAIN - 1)}
    assert load({"ranker.yaml": HEAD + "extends: 1.yaml\n", **chain, f"{MAX_CHAIN - 1}.yaml": "{}"}).name == "ranker"


def test_problems_of_the_policy_come_before_those_of_its_base(load: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError) as caught:
        load({"ranker.yaml": "extends: base.yaml\ntarget: h10\n", "base.yaml": HEAD + "zzz: 1\n"})
    assert [(each.place.file, each.place.line) for each in caught.value.problems] == [
        ("ranker.yaml", 2),
        ("base.yaml", 4),
    ]


def test_a_base_may_contradict_itself_where_the_policy_mends_it(load: Callable[..., Policy]) -> None:
    files = {
        "ranker.yaml": "extends: base.yaml\ndefaults: {dgrad: {weight: {requantize_transpose: false}}}\n",
        "base.yaml": HEAD + "defaults: {dgrad: {weight: {requantize_transpose: true, format: e5m2}}}\n",
    }
    assert load(files).name == "ranker"


def test_a_wrong_value_of_a_base_is_reported_once(load: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError) as caught:
        load({"ranker.yaml": "extends: base.yaml\n", "base.yaml": HEAD + "target: h10\nrules: [{compute: fp4}]\n"})
    places = [(each.place.line, each.place.column) for each in caught.value.problems]
    assert len(places) == len(set(places)) == 3


FOREIGN = {
    "its keys": ("a: 1\n§hunter2: x\nversion: y\n", "a key that no policy has", (1, 1)),
    "one key": ("version: 1\n§hunter2: x\n", "a key that no policy has", (2, 1)),
    "values beside a foreign key": ("hunter2: 1\nname: !hunter2 x\n", "a key that no policy has", (1, 1)),
    "an alias": ("a:\n  b: §*hunter2\n", "no YAML of a policy", (2, 6)),
    "a tag's handle": ("a: !hunter2!x 1\n", "no YAML of a policy", (1, 4)),
    "a text": ("hunter2 x\n", "no YAML of a policy", (1, 1)),
    "a list": ("[hunter2]\n", "no YAML of a policy", (1, 1)),
    "lines of passwd": ("root:x:0:0:hunter2\nx: y: hunter2\n", "no YAML of a policy", (2, 2)),
}


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_outside_of_the_project_that_is_no_policy_is_not_read_aloud(
    kind: str, link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, what, (line, column) = FOREIGN[kind]
    (tmp_path / "secret.yaml").write_text(text.replace("§", ""))
    project = tmp_path / "project"
    (project / "policies").mkdir(parents=True)
    named = "../../secret.yaml"
    if link:
        (project / "policies" / "base.yaml").symlink_to(tmp_path / "secret.yaml")
        named = "base.yaml"
    (project / "policies" / "ranker.yaml").write_text(HEAD + f"extends: {named}\n")
    monkeypatch.chdir(project)
    with pytest.raises(PolicyError) as error:
        load_policy("policies/ranker.yaml")
    (problem,) = error.value.problems
    assert "hunter2" not in str(error.value)
    assert (problem.place.line, problem.place.column) == (line, column)
    assert problem.message == (
        f"extends: {what}; name a policy, or run this in a folder that holds the file, to be shown its text"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError) as error:
        load_policy("project/policies/ranker.yaml")
    assert "no policy has" not in str(error.value)


def test_a_policy_outside_of_the_project_is_a_base_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text(HEAD + "target: h10\n")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "ranker.yaml").write_text("extends: ../base.yaml\n")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(PolicyError, match="h10"):
        load_policy("ranker.yaml")
    (tmp_path / "base.yaml").write_text(HEAD)
    assert load_policy("ranker.yaml").name == "ranker"
