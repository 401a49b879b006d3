"""`loka --help` answers at once: nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "jinja2", "yaml", "numpy", "safetensors")
CODE = """
import atexit, sys
from loka.cli.main import run
atexit.register(lambda: print("LOADED", *[name for name in {heavy!r} if name in sys.modules]))
sys.argv = ["loka", *{arguments!r}]
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    # typer itself takes pydantic, where it is installed, to read the arguments of a verb.
    heavy = HEAVY if len(arguments) > 1 else (*HEAVY, "pydantic")
    code = CODE.format(arguments=arguments, heavy=heavy)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize(
    ("words", "position", "completed"),
    [
        ("loka ex", 1, ["explain"]),
        ("loka compare --dr", 2, ["--draws"]),
        ("loka --install", 1, ["--install-completion"]),
    ],
)
def test_a_shell_completes_verbs_and_options(words, position, completed):
    shell = {"_LOKA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    code = CODE.format(arguments=[], heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | shell)
    assert ran.stdout.split() == [*completed, "LOADED"], ran.stderr


def test_the_script_of_a_shell_calls_loka():
    """The shell is named: what typer finds out by itself is the process that this test happens to be started by."""
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "loka", "--show-completion", "bash"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=named)
    assert "_LOKA_COMPLETE=complete_bash" in ran.stdout
    assert ran.stdout.rstrip().endswith(" loka")


def test_help_names_every_verb_and_only_those(loka):
    text = loka("--help").out
    listed = [line.split()[1] for line in text.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert listed == [
        "init", "validate", "probe", "plan", "explain", "diff", "tune", "generate", "train", "compare", "bench",
        "report", "schema", "doctor",
    ]  # fmt: skip


def test_no_verb_at_all_shows_the_help(loka):
    ran = loka()
    assert ran.status == 2
    assert "Usage" in ran.out + ran.err


def test_version(loka):
    from loka import __version__

    assert loka("--version").out == f"loka {__version__}\n"
