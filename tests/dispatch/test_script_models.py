"""A model whose classes are defined in the script that runs, which Python calls `__main__` and the plan by its file."""

from __future__ import annotations

import runpy
import sys
import types

import pytest

from loka import dispatch
from loka.graph.source import script_in
from tests.support.codegen.policy_packages import policy_packages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

SCRIPT = '''
"""A model, and its training."""

import copy
import io
from dataclasses import dataclass

import torch
from torch import nn

SLOPE = 0.5


@dataclass(frozen=True)
class Sizes:
    parts: int = 1


def gate(x):
    return nn.functional.silu(x) * SLOPE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate, self.sizes = gate, Sizes()

    def forward(self, x):
        y = self.down(self.gate(self.up(self.norm(x))))
        return x + y * self.sizes.parts


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(32, 1))


def example_inputs(batch_size):
    return (torch.randn(batch_size, 32, requires_grad=True),)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train():
    from PACKAGE import apply

    model, x = build(), *example_inputs(16)
    patch = apply(model)
    model(x).sum().backward()
    patch.verify()
    copies = [torch.equal(made(model)(x), model(x)) for made in (copy.deepcopy, saved)]
    bound = len(patch.sites), type(model[0]) is not Block
    patch.remove()
    return *bound, copies, type(model[0]) is Block


if __name__ in ("__main__", "__mp_main__"):
    results = train()
    print(results)
'''
POLICY = """
version: 1
name: {name}
model: {{factory: "{module}:build", batch_size: 16}}
target: reference
defaults: {{compute: fp8, power_of_two: true, requantize_transpose: true, fuse: always}}
rules:
  - match: {{max_n: 16}}
    compute: keep
"""
RESULTS = (2, True, [True, True], True)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with solo.py and inner/train.py, each with a package of its own, fp8_solo and fp8_inner."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "inner").mkdir()
    with pytest.MonkeyPatch.context() as patch, policy_packages(folder) as make:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for module, name in (("solo", "fp8_solo"), ("inner.train", "fp8_inner")):
            (folder / f"{module.replace('.', '/')}.py").write_text(SCRIPT.replace("PACKAGE", name), encoding="utf-8")
            make(name, POLICY.format(name=name, module=module))
            sys.modules.pop(module)
        yield folder
    sys.modules.pop("inner")


@pytest.mark.parametrize("script", ["solo.py", "inner/train.py", "inner.train"])
def test_a_script_that_runs(script, project):
    """Planned by its name, or as a part of a package; a module that is run."""
    if script.endswith(".py"):
        found = runpy.run_path(str(project / script), run_name="__main__")
    else:
        found = runpy.run_module(script, run_name="__main__", alter_sys=True)
    assert found["results"] == RESULTS


def test_a_process_that_multiprocessing_has_spawned(project, monkeypatch):
    """It runs the script as `__mp_main__`, and calls that `__main__` too."""
    main = types.ModuleType("__mp_main__")
    main.__file__ = str(project / "solo.py")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, main)
    exec(compile((project / "solo.py").read_text(), main.__file__, "exec"), vars(main))  # noqa: S102 - written here
    assert main.results == RESULTS
    assert main.Block.__module__ == "__mp_main__"


def test_another_script_is_refused_though_it_has_the_same_text(project):
    other = project / "other.py"
    other.write_text((project / "solo.py").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(dispatch.BindError) as error:
        runpy.run_path(str(other), run_name="__main__")
    assert error.value.problems == (
        f"'0': is a Block defined in the script that runs, {other}, planned was solo.Block: import it from there, or "
        "name this script in the policy and run loka generate again",
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("SLOPE = 0.5", "SLOPE = 0.25", r"silu\(x\) \* SLOPE': v3 = mul\(v2, 0.25\), planned was v3 = mul\(v2, 0.5\)"),
        (
            "return x + y",
            "return x - y",
            r"solo.py:\d+ 'return x - y .*': v6 = sub\(x, v5\), planned was v6 = add\(x, v5\)",
        ),
        ("Sizes()", "Sizes(2)", r"self.sizes.parts': v5 = mul\(v4, 2\), planned was v5 = mul\(v4, 1\): run loka"),
        ("= gate,", "= torch.abs,", r"v2 = abs\(v1\), planned was v2 = silu\(v1\): run loka"),
    ],
)
def test_a_script_that_was_changed_is_refused_with_the_change(project, tmp_path, old, new, problem):
    text = (project / "solo.py").read_text(encoding="utf-8")
    assert old in text
    changed = tmp_path / "solo.py"
    changed.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(dispatch.BindError, match=problem):
        runpy.run_path(str(changed), run_name="__main__")


def test_names_of_the_script(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_in(["train.Ranker"]) == ""  # an interactive session
    main.__file__ = "/project/jobs/train.py"
    assert script_in(["torch.nn.Linear", "jobs.train.Ranker"]) == "jobs.train"
    assert script_in(["train.Outer.Inner"]) == "train"
    assert script_in(["other.train.Ranker", "jobs.Ranker"]) == "train"
