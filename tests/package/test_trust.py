"""SECURITY.md: what LoKA reads as data never becomes code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support import markdown

LOKA = markdown.REPOSITORY / "loka"
UNPICKLE = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
OWN_TEXT = {  # calls that run text, which is LoKA's own
    ("graph/equivalence.py", "exec"),  # the printed forward, for the identity gate
    ("graph/equivalence.py", "compile"),
    ("graph/trace/conditions.py", "eval"),  # a condition that the tracer printed
}


def calls() -> Iterator[tuple[str, str]]:
    """Every call in the package, as its file and the dotted name that is called."""
    for path in sorted(LOKA.rglob("*.py")):
        for node in ast.walk(ast.parse(markdown.read(path))):
            if isinstance(node, ast.Call):
                yield path.relative_to(LOKA).as_posix(), ast.unparse(node.func)


def test_nothing_is_unpickled() -> None:
    for path in LOKA.rglob("*.py"):
        for node in ast.walk(ast.parse(markdown.read(path))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & UNPICKLE, path
    assert [call for call in calls() if call[1] in LOADERS] == []


def test_text_is_run_in_two_places_and_both_are_of_lokas_own() -> None:
    run = {call for call in calls() if call[1] in ("eval", "exec", "compile", "__import__")}
    assert run == OWN_TEXT


def test_yaml_is_read_by_the_safe_loader() -> None:
    for path in LOKA.rglob("*.py"):
        text = markdown.read(path)
        assert not any(name in text for name in ("yaml.Loader", "FullLoader", "UnsafeLoader")), path


def test_no_code_is_generated_from_a_plan_in_a_file() -> None:
    assert {path for path, name in calls() if name in ("read_plan", "read_plan_file")} == {
        "cli/verbs/diff.py",
        "plan/planner.py",
    }
