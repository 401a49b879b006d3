"""Each text of docs/troubleshooting.md and docs/errors.md is what LoKA prints: provoked, or found in the source.

The texts are those of the guide's model. Each code of an error has its section.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loka
from loka.errors import Code, LokaError
from tests.support import guide_pages, markdown
from tests.support.plan.made_profiles import as_version_2

PAGE = markdown.read(markdown.REPOSITORY / "docs" / "troubleshooting.md")
ERRORS = markdown.read(markdown.REPOSITORY / "docs" / "errors.md")
SECTIONS = dict(re.findall(r"^### (LK\d+)\n(.*?)(?=^#|\Z)", ERRORS, re.MULTILINE | re.DOTALL))
# What needs other machines, other mods or a sharded model.
UNPROVOKED = (
    Code.SLOW_PATTERN, Code.UNIT, Code.MACHINE, Code.NOT_ADAPTED, Code.RANKS, Code.GATHER, Code.EXPORT,
    Code.BOUND_MODULE,
)  # fmt: skip
ELSEWHERE = PAGE.partition("\n## On GPUs and in several processes\n")[2].partition("\n## ")[0]  # needs other machines


def _lines(text: str) -> list[str]:
    return [line for block in markdown.blocks(text, "text") for line in block.split("\n")]


QUOTED = _lines(PAGE.replace(ELSEWHERE, ""))
for code, section in SECTIONS.items():
    QUOTED += [line for line in _lines(section) if code not in UNPROVOKED and "is sharded and its input" not in line]

pytestmark = pytest.mark.slow

BRANCHES = """
class Branching(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        return x * 2 if x.shape[0] > 6 else x


def build_linear():
    return nn.Linear(32, 1)


def build_branching():
    return Branching(*build())
"""

FAULTY = """
import itertools

import torch
import tower


def drawn(batch_size, seed):
    while True:
        x = torch.randn(batch_size, 32, generator=GENERATOR)
        yield (x,), (x[:, :1] > 0).float()


GENERATOR = torch.Generator().manual_seed(0)


def wide(batch_size, seed):
    for number, ((x,), target) in enumerate(tower.batches(batch_size, seed)):
        yield (torch.cat([x, x], 1) if number else x,), target


def few(batch_size, seed):
    return itertools.islice(tower.batches(batch_size, seed), 2)


def broken(batch_size, seed):
    for number, ((x,), target) in enumerate(tower.batches(batch_size, seed)):
        yield (x / 0 if number else x,), target


def several(batch_size, seed):
    return ((inputs, (target, target)) for inputs, target in tower.test_batches(batch_size, seed))
"""


@dataclass(slots=True)
class Reader:
    """Somebody who makes mistakes in a folder with the guide's model, small, and hears of them."""

    folder: Path
    policy: str
    heard: list[str] = field(default_factory=list)

    def loka(self, command: str) -> None:
        """Run a verb."""
        self.heard.append(guide_pages.loka(command)[1])

    def tries(self, verb: str, old: str, new: str, options: str = "") -> None:
        """Run a verb on the policy with a change."""
        assert old in self.policy
        (self.folder / "policies" / "tower.yaml").write_text(self.policy.replace(old, new, 1), encoding="utf-8")
        self.loka(f"{verb} policies/tower.yaml {options}")
        (self.folder / "policies" / "tower.yaml").write_text(self.policy, encoding="utf-8")

    def does(self, action: Callable[..., object], *args: object, **options: object) -> None:
        """Call something that raises or warns."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                action(*args, **options)
            except LokaError as error:
                self.heard.append(str(error))
        self.heard += [str(warning.message) for warning in warned]


def policies(reader: Reader) -> None:
    """Mistakes in a policy."""
    reader.loka("validate policies/none.yaml")
    reader.tries("validate", "rules:", "name: again\nrules:")
    reader.tries("validate", "version: 1\n", "")
    reader.tries("validate", "rules:", "extends: none.yaml\nrules:")
    reader.tries("validate", "scaling: auto", "range: static")
    reader.tries("validate", "tower:build", "tower:build_linear")
    reader.tries("plan", "{max_n: 16}, compute: keep", '"6", compute: fp8, padding: false')
    reader.tries("plan", "scaling: auto", "fprop: {scaling: nvfp4}")
    reader.tries("plan", "rules:", 'communication: {weights: [{match: "6", carry: fp8}]}\nrules:')
    reader.tries("validate", "rules:", "mods: [{use: no_bias}, {use: no_bias}]\nrules:")
    reader.tries("plan", "rules:", "measurements: none.jsonl\nrules:")
    reader.loka("diff policies/tower.yaml none.json")
    reader.tries("validate", "scaling: auto", "scaling: rowise")
    reader.tries("validate", "compute: fp8", "computee: fp8")
    reader.tries("validate", "tower:build", "twoer:build")
    reader.tries("validate", "tower:build", "tower:biuld")
    size = '", batch_size: 64}\n'
    reader.tries("validate", f"tower:build{size}train:", f"bare:build{size}# train:")
    reader.tries("validate", "match: {max_n: 16}", 'match: "hed.*"')
    reader.tries("validate", "rules:", 'mods: [{use: hard_swish, match: "4"}]\nrules:')
    reader.tries("validate", "rules:", "mods: [{use: residual_high_precision}]\nrules:")
    reader.tries("probe", "train:", "# train:")


def plans(reader: Reader) -> None:
    """What planning finds: no evidence, a wrong profile, an error over the budget, a forward that branches."""
    profiles = reader.folder / "policies"
    reader.tries("plan", "compute: fp8", "compute: auto")
    reader.tries("plan", "rules:", "profile: profiles/none.safetensors\nrules:")
    (profiles / "bad.safetensors").write_bytes(b"x" * 100)
    reader.tries("plan", "rules:", "profile: bad.safetensors\nrules:")
    branching = reader.policy.replace("tower:build", "tower:build_branching").replace(
        "rules:", "  fuse: always\nrules:"
    )
    reader.tries("plan", reader.policy, branching)
    reader.loka("probe policies/tower.yaml --steps 20 --ne-batches 0")
    found = profiles / "profiles" / "tower.safetensors"
    reader.loka("plan policies/tower.yaml")
    reader.tries("plan", "compute: fp8", "compute: fp8\n  budget: {mere: 0.01}")
    reader.tries("plan", "compute: fp8", "compute: auto\n  budget: {mere: 0.01}")
    reader.tries("plan", "compute: fp8", "compute: auto\n  budget: {mere: 0.5}")
    damaged = bytearray(found.read_bytes())
    damaged[-5] ^= 1
    (profiles / "damaged.safetensors").write_bytes(bytes(damaged))
    reader.tries("plan", "rules:", "profile: damaged.safetensors\nrules:")
    shutil.copy(found, profiles / "older.safetensors")
    as_version_2(profiles / "older.safetensors")
    reader.tries("plan", "rules:", "profile: older.safetensors\nrules:")
    tower = reader.folder / "tower.py"
    narrow = tower.read_text(encoding="utf-8")
    for text in (narrow.replace("64", "96"), narrow):
        tower.write_text(text, encoding="utf-8")
        sys.modules.pop("tower", None)
        importlib.invalidate_caches()
        reader.loka("plan policies/tower.yaml")
    found.unlink()


def packages(reader: Reader) -> None:
    """Packages that are empty, imported too early, edited, stale or not whole."""
    generated = reader.folder / "generated" / "tower"

    def imported() -> None:
        for name in [name for name in sys.modules if name.startswith("generated.tower")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        importlib.import_module("generated.tower")

    reader.tries("generate", "compute: fp8", "compute: auto")
    reader.tries(
        "generate", 'name: tower\nmodel: {factory: "tower:build', 'name: script\nmodel: {factory: "script:build'
    )
    reader.tries("compare", "rules", "rules")
    reader.loka("generate policies/tower.yaml")
    modules = generated / "modules.py"
    modules.write_text(modules.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    reader.does(imported)
    reader.loka("generate policies/tower.yaml")
    (generated / "manifest.json").unlink()
    reader.does(imported)
    reader.loka("generate policies/tower.yaml --force")
    imported()


def models(reader: Reader) -> None:
    """Models that are not the planned one, and steps that are not what was planned."""
    tower, fp8 = importlib.import_module("tower"), importlib.import_module("generated.tower")
    task = type("Task", (nn.Module,), {})()
    task.model = tower.build()
    reader.does(fp8.apply, task)
    reader.does(fp8.apply, torch.jit.script(tower.build()))
    hooked = tower.build()
    hooked[0].register_forward_hook(lambda *_: None)
    reader.does(fp8.apply, hooked)
    replaced = tower.build()
    replaced[2].forward = nn.functional.silu
    reader.does(fp8.apply, replaced)
    grown = tower.build()
    grown[6] = nn.Sequential(grown[6], nn.Linear(1, 1))
    reader.does(fp8.apply, grown, mode="serve")
    reader.does(fp8.apply, grown, strict=True)
    reader.does(fp8.apply, grown)
    other = tower.build()
    other[4].eps = 1e-3
    reader.does(fp8.apply, other)
    with torch._dynamo.config.patch(disable=True):
        reader.does(fp8.apply, tower.build())

    model = tower.build()
    found: list[Any] = []
    reader.does(lambda: found.append(fp8.apply(model)))
    (patch,) = found
    reader.does(fp8.apply, model)
    reader.does(patch.verify)
    model(torch.randn(32, 32))
    reader.does(patch.verify)
    reader.does(model, torch.randn(32, 32, dtype=torch.bfloat16))
    reader.does(patch.keep, "9")
    reader.does(patch.keep, "3")

    def traced() -> None:
        with patch.trace_nonfinite():
            model(torch.full((32, 32), float("nan")))

    reader.does(traced)
    serving = tower.build()
    frozen = fp8.apply(serving, mode="infer")
    reader.does(serving, torch.randn(4, 32))
    with torch.no_grad():
        serving(torch.randn(4, 32))
        serving[3].weight.add_(1)
    reader.does(frozen.verify, backward=False)
    frozen.remove()
    reader.does(frozen.verify)


def trials(reader: Reader) -> None:
    """What `loka.fp8` does not take."""
    tower, rows = importlib.import_module("tower"), torch.randn(64, 32)
    reader.does(loka.fp8, tower.build(), rows, target="h1000")
    reader.does(loka.fp8, tower.build(), rows, loss=tower.loss)
    reader.does(loka.fp8, tower.build(), rows, loss=lambda output: output)
    with torch.device("meta"):
        empty = tower.build()
    reader.does(loka.fp8, empty, rows)
    reader.does(loka.fp8, tower.build(), rows[:, :3])
    reader.does(loka.fp8, tower.build(), rows[:3])
    bound = tower.build()
    importlib.import_module("generated.tower").apply(bound)
    reader.does(loka.fp8, bound, rows)
    reader.does(loka.fp8, torch.compile(tower.build()), rows)
    reader.does(loka.fp8, tower.build(), rows, loss=tower.loss, mode="infer")


def comparisons(reader: Reader) -> None:
    """Comparisons without test data, on seeds that something was tuned on, and of too few pairs; batches that are no
    pair's, or end, or are too wide; times of a CPU.
    """
    for batches in ("drawn", "wide", "few", "broken"):
        reader.tries("train", '"tower:batches"', f'"faulty:{batches}"', "--steps 3")
    reader.tries("train", '"tower:test_batches"', '"faulty:several"', "--steps 3")
    reader.tries("compare", ', test: "tower:test_batches"', "")
    reader.tries("compare", "train: {", "train: {tuned_seeds: [0-13], ", "--first-seed 3")
    reader.loka("compare policies/tower.yaml --seeds 2 --draws 1 --steps 20")
    reader.loka("bench model policies/tower.yaml")


def _heard(folder: Path) -> str:
    """All that LoKA says to a reader who makes mistakes in a folder."""
    guide_pages.tower_in(folder)
    tower = (folder / "tower.py").read_text(encoding="utf-8")
    (folder / "tower.py").write_text(tower + BRANCHES, encoding="utf-8")
    (folder / "faulty.py").write_text(FAULTY, encoding="utf-8")
    (folder / "bare.py").write_text(tower.replace("example_inputs", "other_inputs"), encoding="utf-8")
    (folder / "script.py").write_text(f"from generated import script\n{tower}", encoding="utf-8")
    reader = Reader(folder, (folder / "policies" / "tower.yaml").read_text(encoding="utf-8"))
    with guide_pages.reading_in(folder):
        for mistakes in (policies, plans, packages, models, trials, comparisons):
            mistakes(reader)
    return "\n".join(reader.heard)


@pytest.fixture(autouse=True)
def no_shipped_measurements() -> None:
    """A reader's plans are made by what ships."""


def _printed(quoted: str) -> re.Pattern[str]:
    """What a quoted line matches: `...` stands for anything on the line."""
    return re.compile(".*".join(re.escape(part) for part in quoted.strip().split("...")))


def test_every_quoted_text_is_printed(tmp_path: Path) -> None:
    heard = _heard(tmp_path)
    assert [quoted for quoted in QUOTED if not _printed(quoted).search(heard)] == [], heard


def _templates() -> Iterator[str]:
    """Every string and f-string of the package, with `...` for what is put in."""
    for file in (markdown.REPOSITORY / "loka").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_a_text_of_other_machines_is_in_the_source() -> None:
    elsewhere = [*_lines(ELSEWHERE), *(line for code in UNPROVOKED for line in _lines(SECTIONS[code]))]
    quoted = {re.sub(r" \[LK\d+\](?=:?$)", "", line.strip()).removeprefix("...") for line in elsewhere}
    sources = "\n".join(_templates())
    assert [text for text in quoted if not _printed(text).search(sources)] == []


def test_each_code_has_its_section_and_is_one_that_is_raised() -> None:
    assert list(SECTIONS) == list(Code)  # in their order
    assert [code for code in SECTIONS if f"[{code}]" not in SECTIONS[code]] == []  # in its example
    sources = "".join(markdown.read(path) for path in (markdown.REPOSITORY / "loka").rglob("*.py"))
    assert [code.name for code in Code if not re.search(rf"\bCode\.{code.name}\b", sources)] == []
