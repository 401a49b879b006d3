"""What is fuzzed: each kind of file with whole ones to begin with, what changes them, and what reads them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from loka.codegen.generation import check_package
from loka.codegen.package_folder import JOURNAL, text_hash, write_package
from loka.dispatch.bind.stamps import check_stamps
from loka.dispatch.dispatch_errors import BindError
from loka.kernels.measurements.lookup import Measurements, export
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import ProfiledSites, with_merged_sites
from loka.plan.planner import read_plan
from loka.plan.report.explain_site import explain
from loka.plan.report.plan_diff import diff
from loka.plan.serialize import to_json
from loka.policy.cascade import resolve_settings
from loka.policy.settings import SiteFacts
from loka.probe.profile.profile import RecordedStats
from loka.probe.profile.profile_file import load, load_profile, save
from loka.probe.profile.summarise import unite
from tests.support.fuzz.mutations import Mutate, json_text, jsonl_text, profile_bytes, yaml_text
from tests.support.plan.measured_cases import LATER, gemm, grid, measurement, passes, record

ROOT = Path(__file__).parents[3]
SEEDS = ROOT / "tests" / "fuzz" / "seeds"
PACKAGE = {"__init__.py": "STAMP = 'a'\n", "kernels.py": "x = 1\n"}
FACTS = (
    SiteFacts("layers.0.mlp.0", "linear", 4096, 512, 256, 0.5),
    SiteFacts("layers.1.mlp.2", "linear", 4096, 256, 16, 0.3),
    SiteFacts("head.out", "matmul", 1, 16, 1, 0.2),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One kind of file."""

    file: str  # the name under which a case is written
    seeds: Callable[[], tuple[bytes, ...]]
    mutate: Mutate
    read: Callable[[Path], object]  # everything that reads such a file, and reports what was read
    writes: bool = False  # whether reading it may write, where it does not refuse


def _read_policy(path: Path) -> None:
    resolve_settings(load_policy(path), FACTS)


def _read_plan(path: Path) -> None:
    plan = read_plan(path)
    to_json(plan)
    diff(plan, _whole_plan())
    diff(_whole_plan(), plan)
    for site in plan.sites[:2]:
        explain(plan, site.site.name)


def _read_profile(path: Path) -> None:
    profile = load_profile(path)
    loaded = load(path)
    save(path.with_name("again.safetensors"), loaded)
    if isinstance(loaded, RecordedStats):
        unite(loaded, loaded)
    known = ProfiledSites.of(profile)
    with_merged_sites(known, [each.site for each in _whole_plan().sites])


def _read_recording(path: Path) -> None:
    found = Measurements.open(path, "h100")
    for part in (*found.parts, gemm(100, 100, 100)):
        found.time(part)
        found.error(part)
        found.wrong_reason(part)
    export(path, path.with_name("again.jsonl"), "h100", "made up")
    if b'"sha256": null' in path.read_bytes().partition(b"\n")[0]:
        record(path, [measurement(gemm(64, 64, 64))])


def _read_package(path: Path) -> None:
    path.with_name(JOURNAL).write_bytes(path.read_bytes())
    module = ModuleType("fuzzed")
    module.__file__ = str(path.with_name("__init__.py"))
    sys.modules["fuzzed"] = module
    try:
        with contextlib.suppress(BindError):
            check_stamps("fuzzed", "a", "a")
    finally:
        del sys.modules["fuzzed"]
    files = {**PACKAGE, "manifest.json": "{}"}
    check_package(files, path.parent)
    write_package(files, path.parent)


@cache
def _policies() -> tuple[bytes, ...]:
    return tuple(
        path.read_bytes()
        for path in (ROOT / "tests" / "policy" / "full.yaml", *sorted((ROOT / "policies").glob("*.yaml")))
    )


@cache
def _plans() -> tuple[bytes, ...]:
    """The plan of policies/ranker.yaml with a few of its rows."""
    data = json.loads((ROOT / "generated" / "ranker" / "plan.json").read_text())
    seen: dict[int, dict] = {}
    for row in data["sites"]:
        seen.setdefault(row.get("timing"), row)
    data["sites"] = list(seen.values())[:2]
    for row in data["timings"]:
        del row["options"][2:]
    del data["bindings"][1:]
    data["histories"] = [{path: row[path] for path in sorted(row)[:20]} for row in data["histories"]]
    used = sorted({number for row in data["sites"] for number in row["gemms"]})[:4]
    data["decisions"] = [data["decisions"][number] for number in used]
    for row in data["sites"]:
        row["gemms"] = [used.index(number) if number in used else 0 for number in row["gemms"]]
    return (json.dumps(data).encode(),)


@cache
def _whole_plan():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_bytes(_plans()[0])
        return read_plan(path)


def _seeds(*names: str) -> Callable[[], tuple[bytes, ...]]:
    """Files of seeds: of the first versions, which have no checksums, so that what is changed is looked at."""
    return cache(lambda: tuple((SEEDS / name).read_bytes() for name in names))


@cache
def _recordings() -> tuple[bytes, ...]:
    """A recording of two machines, and what is exported of it."""
    with tempfile.TemporaryDirectory() as folder:
        path, exported = Path(folder, "m.jsonl"), Path(folder, "h100.jsonl")
        wrong = measurement(gemm(64, 64, 8192), wrong="not a number", mere=math.inf)
        record(path, [*grid((64, 1024)), *passes((64,)), wrong])
        record(path, grid((64,), "fbgemm.rowwise"), LATER, {"fbgemm.rowwise": "1.5.0"})
        export(path, exported, "h100", "made up")
        return path.read_bytes(), exported.read_bytes()


@cache
def _manifests() -> tuple[bytes, ...]:
    outputs = {name: text_hash(text) for name, text in PACKAGE.items()}
    manifest = {"format": "loka.package", "version": 1, "stamp": "a", "inputs": {"loka": "0.1.0"}, "outputs": outputs}
    return (
        json.dumps(manifest).encode(),
        json.dumps({"outputs": {name: [each] for name, each in outputs.items()}}).encode(),
    )


SUBJECTS = {
    "policy": Subject("policy.yaml", _policies, yaml_text, _read_policy),
    "plan": Subject("plan.json", _plans, json_text, _read_plan),
    "profile": Subject(
        "profile.safetensors",
        _seeds("summary.safetensors", "full.safetensors"),
        profile_bytes,
        _read_profile,
        writes=True,
    ),
    "recording": Subject("m.jsonl", _recordings, jsonl_text, _read_recording, writes=True),
    "package": Subject("manifest.json", _manifests, json_text, _read_package, writes=True),
}
