"""Kept plans: found again where nothing has changed, made anew where anything that decides them has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import loka
from loka.mods.policy_loader import load_policy
from loka.plan import loaded_sources, plan_cache, planner
from loka.plan.plan import Gain, Plan
from loka.plan.plan_cache import KnownPlan, PlanCache
from loka.plan.planner import planned
from loka.plan.prospect import Prospect
from loka.plan.serialize import to_json
from loka.plan.tuning.record import TunedFile

HELPER = "def scaled(x, by):\n    return x * by\n"
MODEL = """\
import json
from pathlib import Path

import torch
from torch import nn

from keptparts import scaled

SETTINGS = json.loads((Path(__file__).parent / "settings.json").read_text())
FACTOR = SETTINGS["factor"]


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, SETTINGS["width"])
        self.second = nn.Linear(SETTINGS["width"], 64)
        self.register_buffer("table", torch.full((64,), SETTINGS["filled"]))

    def forward(self, x):
        return scaled(self.second(torch.relu(self.first(x))), FACTOR) + self.table


def build():
    return Kept()


def build_with_lambda():
    model = Kept()
    model.extra = lambda x: x
    return model


def inputs(batch_size):
    with open(Path(__file__).parent / "calls.txt", "a") as log:
        log.write(f"{batch_size}\\n")
    return (torch.randn(batch_size, 64) + SETTINGS["shift"],)
"""
SETTINGS = {"width": 128, "factor": 2, "filled": 0.0, "shift": 0.0}
POLICY = """\
version: 1
name: kept
model: {factory: "keptmodel:build", inputs: "keptmodel:inputs", batch_size: 96}
defaults: {compute: fp8}
"""
Planning = Callable[[], tuple[Plan, bool]]


class Folder:
    """A policy and its model in a folder; every file is older than this process, as in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, PlanCache(folder / "cache")
        self.write("keptparts.py", HELPER)
        self.write("keptmodel.py", MODEL)
        self.write("settings.json", json.dumps(SETTINGS))
        self.write("kept.yaml", POLICY)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        os.utime(path, (1e9, 1e9))

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def is_traced(self, gains: bool = False, policy: str = "kept.yaml") -> bool:
        """Plan as a new process would; True if the model was traced, False if the plan was kept. Equal in any case."""
        for name in ("keptmodel", "keptparts"):
            sys.modules.pop(name, None)
        log = self.folder / "calls.txt"
        log.unlink(missing_ok=True)
        found = planned(self.folder / policy, gains, cache=self.cache)
        calls = log.read_text().split()
        assert to_json(found.plan) == to_json(planned(self.folder / policy, gains).plan)
        return "96" in calls

    def kept(self) -> list[Path]:
        return sorted(self.cache.folder.glob("*.json"))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loaded_sources, "_STARTED", time.time_ns())  # other tests may have loaded files of their own
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a .pyc is known by its source's time, which is always one
    yield Folder(tmp_path)
    for name in ("keptmodel", "keptparts"):
        sys.modules.pop(name, None)


def test_an_unchanged_policy_is_traced_once(model: Folder) -> None:
    assert model.is_traced()
    assert not model.is_traced()
    assert not model.is_traced(gains=True)  # it has no mods


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("keptmodel.py", "torch.relu", "torch.sigmoid"),
        ("keptparts.py", "x * by", "by * x"),
        ("settings.json", '"width": 128', '"width": 256'),
        ("settings.json", '"factor": 2', '"factor": 3'),  # a global of the forward's file
        ("settings.json", '"filled": 0.0', '"filled": 1.0'),  # the values of a buffer
        ("settings.json", '"shift": 0.0', '"shift": 1.0'),  # the values of the example inputs
        ("kept.yaml", "compute: fp8", "compute: keep"),
        ("kept.yaml", "name: kept\n", "# a line more\nname: kept\n"),  # the plan names lines of the policy
        ("kept.yaml", "batch_size: 96", "batch_size: 192"),
    ],
)
def test_a_changed_file_makes_the_plan_unknown(model: Folder, file: str, old: str, new: str) -> None:
    assert model.is_traced()
    before = planned(model.folder / "kept.yaml", cache=model.cache)
    model.edit(file, old, new)
    if "192" in new:
        sys.modules.pop("keptmodel", None)
        assert planned(model.folder / "kept.yaml", cache=model.cache).plan != before.plan
        return
    assert model.is_traced()
    assert not model.is_traced()


def test_another_version_makes_the_plan_unknown(model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.is_traced()
    for place, name, value in (
        (plan_cache, "__version__", "99.0"),
        (plan_cache.torch, "__version__", "99.0"),
        (sys, "version", "4.0"),
    ):
        with monkeypatch.context() as other:
            other.setattr(place, name, value)
            assert model.is_traced()
    assert not model.is_traced()
    state = loaded_sources._state  # of a source of LoKA
    monkeypatch.setattr(loaded_sources, "_state", lambda path: "other" if path == planner.__file__ else state(path))
    assert model.is_traced()


def test_another_profile_or_other_measurements_make_the_plan_unknown(model: Folder) -> None:
    policy = load_policy(model.folder / "kept.yaml")
    keys = set()
    for known, measurements in ((None, None), (Named("a"), None), (Named("b"), None), (None, Named("a"))):
        sys.modules.pop("keptmodel", None)
        module = planner.build_module(policy.model.factory)
        keys.add(planner._key(policy, known, measurements, TunedFile("", ""), module))  # type: ignore[arg-type]
    assert None not in keys
    assert len(keys) == 4


class Named:
    """What names a profile, or measurements."""

    def __init__(self, digest: str) -> None:
        self.name, self.sha256 = "file", digest


@pytest.mark.parametrize("case", ["a file changed since it was loaded", "a model that cannot be described"])
def test_what_cannot_be_known_again_is_not_kept(model: Folder, case: str) -> None:
    if case == "a file changed since it was loaded":
        os.utime(model.folder / "keptparts.py")
    else:
        model.edit("kept.yaml", "keptmodel:build", "keptmodel:build_with_lambda")
    assert model.is_traced()
    assert not model.kept()


def test_a_damaged_or_foreign_file_is_ignored_and_replaced(model: Folder) -> None:
    assert model.is_traced()
    (path,) = model.kept()
    whole = path.read_bytes()
    for data in (b"", whole[:-100], whole.replace(b"e4m3", b"e5m2"), b"\xff\xfe", b"[1]", whole + b" "):
        path.write_bytes(data)
        assert model.is_traced()
        assert not model.is_traced()
    path.chmod(0o666)  # anyone can have written it
    assert model.is_traced()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_keeps_nothing(model: Folder) -> None:
    model.cache.folder.write_text("a file")
    assert model.is_traced()
    assert model.is_traced()


def test_the_oldest_plans_are_removed(model: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_FILES", 2)
    for number in range(3):
        model.write("kept.yaml", f"{POLICY}# {number}\n")
        assert model.is_traced()
        for place, path in enumerate(sorted(model.kept(), key=lambda each: each.stat().st_mtime_ns)):
            os.utime(path, (1e9 + 10 * number + place,) * 2)
    assert len(model.kept()) == 2
    assert not model.is_traced()
    model.write("kept.yaml", f"{POLICY}# 0\n")
    assert model.is_traced()


def test_gains_are_found_where_they_are_asked_for_alone(model: Folder) -> None:
    model.write("kept.yaml", POLICY + "mods:\n  - {use: no_bias, except: second}\n")
    plan = planned(model.folder / "kept.yaml").plan
    with_gain = replace(plan, mods=tuple(replace(mod, gain=Gain(1.0, 0.5)) for mod in plan.mods))
    prospect = Prospect(192, 0.5, 10.0, 20.0, assumed=True)
    model.cache.keep("key", KnownPlan(plan, ("a note",)))
    assert model.cache.find("key", gains=True, prospects=False) is None
    assert model.cache.find("key", gains=False, prospects=True) is None
    assert model.cache.find("key", gains=False, prospects=False) == KnownPlan(plan, ("a note",))
    whole = KnownPlan(with_gain, (), prospect, gains=True, prospects=True)
    model.cache.keep("key", whole)
    assert model.cache.find("key", gains=True, prospects=True) == whole
    assert model.cache.find("key", gains=False, prospects=False) == KnownPlan(plan)
    assert plan.mods


def test_the_folder_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOKA_CACHE")
    assert PlanCache.default() == PlanCache(tmp_path / "loka" / "plans")
    assert PlanCache.default(False) is None
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "own"))
    assert PlanCache.default() == PlanCache(tmp_path / "own" / "plans")
    monkeypatch.setenv("LOKA_CACHE", "off")
    assert PlanCache.default() is None
    monkeypatch.delenv("LOKA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PlanCache.default() == PlanCache(tmp_path / ".cache" / "loka" / "plans")


@pytest.mark.slow
def test_verbs_of_other_processes_find_the_plan(model: Folder) -> None:
    environment = {
        **os.environ,
        "LOKA_CACHE": str(model.folder / "own"),
        "PYTHONPATH": str(Path(loka.__file__).parents[1]),
    }

    def run(*verbs: str) -> bool:
        """Run verbs side by side; True if the model was traced."""
        log = model.folder / "calls.txt"
        log.unlink(missing_ok=True)
        commands = [(sys.executable, "-m", "loka", *verb.split()) for verb in verbs]
        running = [
            subprocess.Popen(each, env=environment, cwd=model.folder, stdout=subprocess.DEVNULL) for each in commands
        ]
        assert [each.wait() for each in running] == [0] * len(verbs)
        return "96" in log.read_text().split()

    assert run("generate kept.yaml")
    made = {path.name: path.read_bytes() for path in (model.folder / "generated/kept").iterdir() if path.is_file()}
    assert not run("plan kept.yaml", "generate --check kept.yaml")
    assert run("generate --no-cache kept.yaml -o other")
    assert made == {path.name: path.read_bytes() for path in (model.folder / "other").iterdir() if path.is_file()}


def test_a_policy_that_was_changed_in_memory_is_another(model: Folder) -> None:
    assert model.is_traced()
    loaded = load_policy(model.folder / "kept.yaml")
    other = replace(loaded, target="h200")
    assert planned(other, cache=model.cache).plan.target.value == "h200"
    assert planned(loaded, cache=model.cache).plan.target.value == "h100"
