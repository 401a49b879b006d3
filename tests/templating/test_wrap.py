"""Long statements are opened where `ruff format` opens them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from loka.templating.wrap import WIDTH, wrap

ROOT = Path(__file__).parents[2]
DOUBLE = '"'
NAMES = [f"operand_{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


def joined(count: int, form: str = "{}") -> str:
    return ", ".join(form.format(name) for name in NAMES[:count])


STATEMENTS = {
    "arguments on one line": f"y = fused.norm_forward({joined(10)})",
    "arguments one a line": f"y = fused.norm_forward({joined(12)})",
    "keyword arguments": f"y = fused.norm_forward({joined(8, '{0}={0}_value')})",
    "a nested call": f"y = fused.norm_forward({joined(5)}, dtype=torch.empty({joined(11)}), last={NAMES[0]})",
    "a launch": f"_kernel[(programs,)]({joined(10)}, num_warps=4)",
    "parameters on one line": f"def forward({joined(9)}) -> Tensor:\n    return x",
    "parameters one a line": f"def forward({joined(9, '{}: Tensor')}) -> tuple[Tensor, Tensor]:\n    return x",
    "one long parameter": f"def forward({'a' * 90}: Tensor) -> tuple[Tensor, Tensor]:\n    return x",
    "a tuple": f"loka_reads = ({joined(10)})",
    "a list in a call": f"y = torch.cat([{joined(10)}], dim=-1)",
    "a method of a call": f"y = tl.load({joined(8)}, mask=inside, other=0.0).to(tl.float32)",
    "targets": f"({joined(12)},) = fused.norm_forward()",
    "a generator": f"y = tuple(fused.norm_forward({joined(5)}) for number in range({NAMES[3]}))",
    "strings with brackets": f'y = norm_forward("(", "a, b", {joined(9)})',
    "a dictionary": f"y = dict(zip({joined(5)}, strict=True), **{{{joined(6, DOUBLE + '{0}' + DOUBLE + ': {0}')}}})",
    "values that are returned": f"def f():\n    return {joined(9)}, x.to(dtype)",
    "tuples of targets": f"({joined(5)}), ({joined(6)}), {NAMES[0]}, ({NAMES[1]},) = dispatch.saved(ctx)",
    "tuples of targets, a short one": f"({joined(2)}), ({joined(3)}) = dispatch.saved(ctx)",
    "tuples of many targets": f"({joined(12)}), ({joined(2)}) = dispatch.saved(ctx)",
    "tuples that end where a line does": f"({joined(4)}), ({joined(3)}) = dispatch.saved_of(ctx)",
    "arguments of several stages": f"y = Function.apply({NAMES[0]}, *({joined(5)}), *({joined(6)}), dtype)",
    "many types of a long signature": f"def forward({joined(9, '{}: Tensor')}) -> tuple[{joined(12)}]:\n    return x",
    "types": f"def forward(x: Tensor) -> tuple[{joined(9)}]:\n    return x",
    "a decorator": f"@triton.jit(do_not_specialize=[{joined(8, DOUBLE + '{}' + DOUBLE)}])\ndef f():\n    return 0",
    "bare targets": f"{joined(11)} = fused.norm_forward({joined(4)})",
    "bare targets, a value in brackets": f"{joined(9)} = fused.norm_forward_of_a_long_name({joined(4)})",
    "bare targets and many arguments": f"{joined(11)} = fused.norm_forward({joined(12)})",
    "bare targets of a name": f"{joined(12)} = ctx.dtypes",
    "a tuple that is returned": f"def f():\n    return {joined(11)}",
    "names that are deleted": f"del {joined(12)}",
    "a bracket that comes late": f"x = f(self.{'a' * 60}.{'b' * 60}.reshape(32, 48), 3)",
    "a kernel's parameters": f"def kernel({joined(12, '{}_ptr')}, m, WIDTH: tl.constexpr):\n    return",
    "a kernel's arguments": f"kernel_tile(tile - first_tile, {joined(10, '{}_ptr')}, m, side=128)",
    "a comment": f"# {joined(14)}\ny = 0",
    "a docstring": f'def f() -> None:\n    """{joined(14)}\n\n    {joined(14)}\n    """',
}


@pytest.mark.parametrize("indent", [0, 4, 8])
def test_ruff_changes_nothing(indent: int) -> None:
    text = "import x\n"
    for level in range(indent // 4):
        text += " " * 4 * level + f"if level_{level}:\n"
    for statement in STATEMENTS.values():
        separated = statement.startswith(("def ", "@"))
        body = "".join(f"{' ' * indent}{line}".rstrip() + "\n" for line in statement.split("\n"))
        text += ("\n" * (2 if not indent else 1) if separated else "") + body
        text += "\n" * (2 if not indent else 1) if separated else ""
    wrapped = wrap(text)
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "generated.py", "-"],
        input=wrapped, capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    without_blank = [line for line in wrapped.split("\n") if line]
    assert without_blank == [line for line in formatted.split("\n") if line]


def test_a_line_that_fits_stays() -> None:
    text = f"y = f({'a' * (WIDTH - 7)})\n"
    assert len(text) == WIDTH + len("\n")
    assert wrap(text) == text


def test_prose_is_filled() -> None:
    text = f'def f() -> None:\n    """{joined(14)}."""\n    # {joined(14)}\n'
    wrapped = wrap(text)
    lines = wrapped.split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert [line[:6] for line in lines[1:5]] == ['    ""', "    op", "    # ", "    # "]
    assert " ".join(wrapped.replace("# ", "").split()) == " ".join(text.replace("# ", "").split())


def test_targets_are_opened_where_the_call_cannot_help() -> None:
    wrapped = wrap(f"{joined(12)} = fused.backward(grad)\n")
    assert wrapped.startswith("(\n    operand_a,\n")
    assert wrapped.endswith("    operand_l,\n) = fused.backward(grad)\n")


def test_parameters_of_a_kernel_share_lines() -> None:
    for count in range(8, 27):
        wrapped = wrap(
            f"def _kernel({joined(count, '{}_ptr')}, m, WIDTH: tl.constexpr, ROWS: tl.constexpr):\n    pass\n"
        )
        head, *inner, end, _, _ = wrapped.split("\n")
        assert (head, end) == ("def _kernel(", "):  # fmt: skip")
        assert max(map(len, inner)) <= WIDTH
        assert all(line.startswith("    operand") or "tl.constexpr" in line or line == "    m," for line in inner)
        assert all(line.endswith(",") and not line.endswith(":,") for line in inner)
        assert len(inner) <= 1 + count // 6


def test_triple_quotes_in_a_literal_begin_no_docstring() -> None:
    names = "    names = (" + ", ".join(['"one two"'] * 14) + ")"
    text = 'def f() -> None:\n    quotes = \'"""\'\n' + names
    assert ast.literal_eval(wrap(text).partition("names = ")[2]) == ("one two",) * 14
