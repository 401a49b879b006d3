"""Damaged files of every format: taken or refused with a place, never a traceback, a hang or a file left behind.

`make test` draws the same cases each time; `make fuzz` draws others for as long as it is told.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as tensors_of
from safetensors.torch import save as to_safetensors

from loka.codegen.generation import check_package
from loka.codegen.package_folder import JOURNAL, text_hash, write_package
from loka.dispatch.bind.stamps import check_stamps
from loka.dispatch.dispatch_errors import BindError
from loka.errors import LokaError
from loka.kernels.measurements.lookup import Measurements, export
from loka.kernels.measurements.measurement import digest
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import ProfiledSites, with_merged_sites
from loka.plan.planner import read_plan
from loka.plan.serialize import to_json
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from loka.policy.cascade import resolve_settings
from loka.policy.problems import PolicyError
from loka.policy.settings import SiteFacts
from loka.probe.profile import profile_file
from loka.probe.profile.profile import RecordedStats
from loka.probe.profile.summarise import unite
from tests.support.damage import ODD, ODD_YAML, Change, Object, Raw, changed, damaged, parsed, tree_of, written
from tests.support.plan.made_profiles import make_recorded
from tests.support.plan.measured_cases import LATER, gemm, grid, measurement, passes, record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = {"__init__.py": "STAMP = 'a'\n", "kernels.py": "x = 1\n"}
FACTS = (
    SiteFacts("layers.0.mlp.0", "linear", 4096, 512, 256, 0.5),
    SiteFacts("layers.1.mlp.2", "linear", 4096, 256, 16, 0.3),
    SiteFacts("head.out", "matmul", 1, 16, 1, 0.2),
)
SECONDS = float(os.environ.get("LOKA_FUZZ_SECONDS", "0"))  # for each format; 0: one round, the same each time
SEED = int(os.environ.get("LOKA_FUZZ_SEED", "15"))
SLOW = 5.0  # seconds of the processor that no case takes
LONGEST = 2000  # characters of a message
WARNINGS = 5
PLACE = re.compile(r"^[^\n]+?(:\d+:\d+)?: ")
DOUBLES = (b"\xff" * 8, bytes(8), bytes(6) + b"\xf0\x7f", bytes(7) + b"\x80", b"\xff" * 7 + b"\x7f")
NUMBER = st.integers(0, (1 << 16) - 1)
CHANGE = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of file."""

    file: str  # the name under which a case is written
    whole: Callable[[], tuple[bytes, ...]]  # files to begin with
    mutate: Callable[[bytes, Sequence[Change]], bytes]  # changes of what it says, under checksums that fit
    read: Callable[[Path], object]  # everything that reads such a file, and reports what was read
    writes: bool = False  # whether reading it may write, where it does not refuse


def to_bytes(trees: Sequence[object]) -> bytes:
    """Trees, of which one is the rule, as JSON."""
    return "".join(map(written, trees)).encode("utf-8", "surrogatepass")


def mutate_json(data: bytes, changes: Sequence[Change]) -> bytes:
    root = [parsed(data.decode())]
    changed(root, changes)
    return to_bytes(root)


def mutate_yaml(data: bytes, changes: Sequence[Change]) -> bytes:
    """In the flow style below the first level."""
    root = [tree_of(yaml.safe_load(data.decode()))]
    changed(root, changes, (*ODD, *ODD_YAML))
    if len(root) != 1 or not isinstance(root[0], Object):
        return to_bytes(root)
    lines = (f"{written(key) if isinstance(key, Raw) else key}: {written(each)}\n" for key, each in root[0].pairs)
    return "".join(lines).encode("utf-8", "surrogatepass")


def mutate_recording(data: bytes, changes: Sequence[Change]) -> bytes:
    root = [parsed(line) for line in data.decode().splitlines()]
    changed(root, changes)
    lines: list[str] = []
    for each in root:
        if isinstance(each, Object) and any(key == "finished" for key, _ in each.pairs):
            each.pairs = [["sha256", digest(lines[1:])] if pair[0] == "sha256" else pair for pair in each.pairs]
        lines += written(each).splitlines() or [""]
    if root and isinstance(root[0], Object):
        for pair in root[0].pairs:
            if pair[0] == "sha256" and isinstance(pair[1], str):
                pair[1] = digest("\n".join(lines[1:]).splitlines())
        lines[0] = written(root[0])
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def mutate_profile(data: bytes, changes: Sequence[Change]) -> bytes:
    """The header's values, or those of a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "p")
        path.write_bytes(data)
        with safe_open(path, framework="pt") as opened:
            root = [parsed(opened.metadata()[profile_file.METADATA])]
    tensors = {name: each for name, each in tensors_of(data).items() if not name.startswith(profile_file.CHECKSUM)}
    for kind, place, which, put in changes:
        if kind % 8 < 6 or not tensors:
            changed(root, [(kind // 8, place, which, put)])
        else:
            raw = tensors[sorted(tensors)[place % len(tensors)]].view(-1).view(torch.uint8)
            at = which * 8 % max(len(raw), 1)
            odd = torch.frombuffer(bytearray(DOUBLES[put % len(DOUBLES)]), dtype=torch.uint8)
            raw[at : at + 8] = odd[: len(raw[at : at + 8])]
    text = to_bytes(root).decode("utf-8", "replace")
    with contextlib.suppress(OverflowError):
        sums = profile_file._checksums(text, tensors)
        return to_safetensors({**tensors, **sums}, {profile_file.METADATA: text})
    return data


def read_profile(path: Path) -> None:
    loaded = profile_file.load(path)
    profile_file.save(path.with_name("again.safetensors"), loaded)
    if isinstance(loaded, RecordedStats):
        unite(loaded, loaded)
    known = ProfiledSites.of(profile_file.load_profile(path))
    with_merged_sites(known, [each.site for each in whole_plan().sites])


def read_plans(path: Path) -> None:
    plan = read_plan(path)
    to_json(plan)
    diff(plan, whole_plan())
    diff(whole_plan(), plan)
    for site in plan.sites[:2]:
        explain(plan, site.site.name)


def read_recording(path: Path) -> None:
    found = Measurements.open(path, "h100")
    for part in (*found.parts, gemm(100, 100, 100)):
        found.time(part)
        found.error(part)
        found.wrong_reason(part)
    export(path, path.with_name("again.jsonl"), "h100", "made up")
    if b'"sha256": null' in path.read_bytes().partition(b"\n")[0]:
        record(path, [measurement(gemm(64, 64, 64))])


def read_package(path: Path) -> None:
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


def policies() -> tuple[bytes, ...]:
    many = "".join(f"k{number}: {number}\n" for number in range(300)).encode()
    files = (ROOT / "tests" / "policy" / "full.yaml", *sorted((ROOT / "policies").glob("*.yaml")))
    return (*(path.read_bytes() for path in files), many)


def plans() -> tuple[bytes, ...]:
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
def whole_plan():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_bytes(plans()[0])
        return read_plan(path)


def profiles() -> tuple[bytes, ...]:
    recorded = make_recorded((24, 16))
    return tuple(profile_file._to_bytes(*profile_file._contents(each)) for each in (recorded, recorded.profile))


def recordings() -> tuple[bytes, ...]:
    """A recording of two machines, and what is exported of it."""
    with tempfile.TemporaryDirectory() as folder:
        path, exported = Path(folder, "m.jsonl"), Path(folder, "h100.jsonl")
        wrong = measurement(gemm(64, 64, 8192), wrong="not a number", mere=math.inf)
        record(path, [*grid((64, 1024)), *passes((64,)), wrong])
        record(path, grid((64,), "fbgemm.rowwise"), LATER, {"fbgemm.rowwise": "1.5.0"})
        export(path, exported, "h100", "made up")
        return path.read_bytes(), exported.read_bytes()


def manifests() -> tuple[bytes, ...]:
    outputs = {name: text_hash(text) for name, text in PACKAGE.items()}
    manifest = {"format": "loka.package", "version": 1, "stamp": "a", "inputs": {"loka": "0.1.0"}, "outputs": outputs}
    odd_names = {**manifest, "outputs": {**outputs, "\ud800.py": "a" * 64, "a\0b.py": "a" * 64}}
    lists = {"outputs": {name: [each] for name, each in outputs.items()}}
    return tuple(json.dumps(each).encode() for each in (manifest, odd_names, lists))


FORMATS = {
    "policy": FileFormat("policy.yaml", cache(policies), mutate_yaml,
                         lambda path: resolve_settings(load_policy(path), FACTS)),
    "plan": FileFormat("plan.json", cache(plans), mutate_json, read_plans),
    "profile": FileFormat("profile.safetensors", cache(profiles), mutate_profile, read_profile, writes=True),
    "recording": FileFormat("m.jsonl", cache(recordings), mutate_recording, read_recording, writes=True),
    "package": FileFormat("manifest.json", cache(manifests), mutate_json, read_package, writes=True),
}  # fmt: skip


def judge(name: str, data: bytes, folder: Path) -> None:
    """Read one case in an empty folder. Raises AssertionError, or what reading raised, where that did not go well."""
    kind = FORMATS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / kind.file
    path.write_bytes(data)
    if name == "package":
        for other, text in PACKAGE.items():
            (folder / other).write_text(text)
    before, start = contents(folder), time.process_time()
    refused: LokaError | None = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            kind.read(path)
        except LokaError as error:
            refused = error
    assert time.process_time() - start < SLOW
    assert len(warned) <= WARNINGS
    if refused is not None:
        message = str(refused)
        assert len(message.replace(str(path), path.name)) < LONGEST, message
        assert path.name in message or str(path.parent) in message, message
        lines = message.split("\n") if isinstance(refused, PolicyError) else []
        assert all(PLACE.match(line) for line in lines if not line.startswith("and ")), message
    if refused is not None or not kind.writes:
        after = contents(folder)
        new = {name for name in before.keys() | after if before.get(name) != after.get(name)}
        assert new <= ({JOURNAL} if name == "package" else set()), "a refused file changed these"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", FORMATS)
def test_any_change_of_a_file_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    kind, end, number = FORMATS[name], time.monotonic() + SECONDS, SEED
    whole = kind.whole()
    while number == SEED or time.monotonic() < end:

        @seed(number)
        @settings(
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(which=NUMBER, changes=st.lists(CHANGE, max_size=3), of_bytes=st.lists(CHANGE, max_size=2))
        def draw(which: int, changes: list[Change], of_bytes: list[Change]) -> None:
            data = whole[which % len(whole)]
            judge(name, damaged(kind.mutate(data, changes) if changes else data, of_bytes), tmp_path / "case")

        draw()
        number += 1


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files_are_taken(name: str, tmp_path: Path) -> None:
    """The control of the test above."""
    for data in FORMATS[name].whole():
        judge(name, data, tmp_path / "case")
    path = tmp_path / FORMATS[name].file
    path.write_bytes(FORMATS[name].mutate(FORMATS[name].whole()[0], []))
    if name != "policy":  # its patterns are for other sites
        FORMATS[name].read(path)


def test_arrays_in_arrays_are_refused(tmp_path: Path) -> None:
    for name in FORMATS:
        judge(name, b"[" * 100_000, tmp_path / "case")
