"""Expressions come out as `ruff format` would write them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.codegen.layout import call, formatted, literal, parse, quoted
from loka.errors import LokaError
from loka.templating.wrap import WIDTH, wrap

RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))

EXPRESSIONS = [
    "a+b",
    "(a+b)*c",
    "a-(b-c)",
    "-a**2",
    "(-a)**2",
    "a**-b",
    "f(x)**2",
    "a**b**c",
    "(a**b)**c",
    "x[0:3]",
    "x[a+1:]",
    "x[:a+1]",
    "x[a+1::2]",
    "x[:, 0, None, ...]",
    "x[(0,)]",
    "x[a.b:c]",
    "a if b else c",
    "(a if b else c)+1",
    "a and b or c",
    "not a is None",
    "(1).bit_length()",
    "(1,)",
    "()",
    "{'a': 1, **b}",
    "f(*a, **k)",
    "f(a, b=3, c='it\"s')",
    "'it\\'s'",
    "f(a)(b)",
    "a @ b.t()",
    "~a",
    "1e5",
    "x.view(-1, 128).transpose(-1, -2)",
    "getattr(x, 'shape')",
    "getattr(x, 'not plain')",
    "f(1, (2, 3), [4, 5])",
    "b'\\xff\"'",
    "1j + 2",
]


def test_ruff_changes_nothing(tmp_path: Path) -> None:
    lines = [f"y = {formatted(text)}" for text in EXPRESSIONS]
    for a in (5, 60, 105, 110, 130):
        for b in (5, 60, 115):
            long = f"layer_norm({'a' * a}, (2048,), weight=self.{'b' * b}.weight, bias=[{'c' * b}, 2], eps=1e-05)"
            nested = f"({long}, {'d' * a})"
            lines += wrap(f"y = {formatted(long)}\ny = {formatted(nested)}").split("\n")
            parameters = [f"{'p' * a}: Tensor", f"{'q' * b}: int"]
            defined = f"def {call('f', parameters)} -> Tensor:"
            lines.append(f"\n\n{wrap(defined)}\n    return 1\n\n")
    file = tmp_path / "laid_out.py"
    text = "\n".join(lines).replace("\n\n\n\n", "\n\n").rstrip("\n") + "\n"
    file.write_text(text.replace("\n\n\n\n\n", "\n\n\n"), encoding="utf-8")
    result = subprocess.run(
        [RUFF, "format", "--isolated", "--line-length", str(WIDTH), "-"], input=text, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    # Blank lines between definitions are the templates' business: only what lies on lines is compared.
    assert [x for x in result.stdout.split("\n") if x] == [x for x in text.split("\n") if x]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_means_the_same(text: str) -> None:
    again = parse(formatted(text))
    if not text.startswith("getattr"):
        assert ast.dump(again) == ast.dump(parse(text))


@pytest.mark.slow
@given(st.text())
@settings(max_examples=300)
def test_quoted_is_a_literal_in_ascii(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    assert quoted(text).isascii()
    assert "\n" not in quoted(text)


@pytest.mark.slow
@given(st.recursive(st.integers() | st.text() | st.none(), lambda inner: st.lists(inner, max_size=4).map(tuple)))
@settings(max_examples=200)
def test_literal_reads_back(value: object) -> None:
    assert ast.literal_eval(literal(value)) == value


@pytest.mark.parametrize("text", ["lambda: 0", "[x for x in y]", "a := 1", "a; b", "", "f'{a}'", "await x", "\0"])
def test_what_generated_code_never_holds_is_refused(text: str) -> None:
    with pytest.raises(LokaError, match="report"):
        formatted(text)
