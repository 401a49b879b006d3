"""The names of `import loka`: what they are, that they are imported late, and the page that documents them."""

from __future__ import annotations

import logging
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import loka

REPOSITORY = Path(__file__).parents[2]
MODEL = """\
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def inputs(batch_size):
    return (torch.randn(batch_size, 32),)
"""
POLICY = """\
version: 1
name: small
model: {factory: "smallmodel:build", inputs: "smallmodel:inputs", batch_size: 64}
defaults: {compute: fp8}
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A policy and its model, in the current directory."""
    (tmp_path / "smallmodel.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("smallmodel", None)  # another test's
    yield Path("small.yaml")
    sys.modules.pop("smallmodel", None)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def test_every_public_name_is_there_and_no_other() -> None:
    assert list(loka.__all__) == sorted(loka.__all__)
    for name in loka.__all__:
        assert getattr(loka, name) is not None
        assert name in dir(loka)
    with pytest.raises(AttributeError, match="module 'loka' has no attribute 'Plan'"):
        _ = loka.Plan


def test_everything_that_is_raised_has_one_root() -> None:
    for name in loka.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(loka, name), loka.LokaError)
        elif name.endswith("Warning"):
            assert issubclass(getattr(loka, name), UserWarning)
    assert (loka.InputError.exit_status, loka.CheckFailedError.exit_status) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import loka", ("torch", "pydantic", "yaml", "jinja2", "typer", "safetensors")),
        ("import loka; loka.InputError; loka.load_policy", ("torch", "jinja2", "typer", "safetensors")),
        # A training machine has torch alone.
        (
            "import loka; loka.BindError; loka.Guard; loka.portable",
            ("pydantic", "yaml", "jinja2", "typer", "safetensors"),
        ),
    ],
)
def test_a_name_imports_what_it_needs_alone(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_policy_is_loaded_planned_and_generated(policy: Path) -> None:
    assert loka.load_policy(policy).name == "small"
    plan = loka.make_plan(policy)
    assert plan.share_fp8 == 1.0
    assert loka.make_plan(loka.load_policy(policy)) == plan
    made = loka.generate(policy)
    assert made.folder == Path("generated/small")
    assert made.plan == plan
    assert loka.generate(loka.load_policy(policy)).written == ()
    assert {"modules.py", "plan.json", "manifest.json"} <= set(made.written)
    assert (loka.generate(policy).written, loka.generate(policy, check=True).written) == ((), ())
    assert loka.generate(policy, "elsewhere").folder == Path("elsewhere")
    assert (policy.parent / "elsewhere" / "plan.json").exists()


def test_planning_seeds_no_gpu_and_leaves_torchs_logs(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would restore the GPU's random state."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    logs = [logging.getLogger(name) for name in ("torch.__trace", "torch._dynamo")]
    before = [(log.disabled, list(log.handlers)) for log in logs]
    policy.write_text(POLICY.replace("compute: fp8", "compute: fp8, fuse: always"), encoding="utf-8")
    assert any(site.region for site in loka.make_plan(policy).sites)
    assert seeded == []
    assert [(log.disabled, log.handlers) for log in logs] == before


def test_an_edited_file_is_told_and_overwritten_by_force_alone(policy: Path) -> None:
    edited = loka.generate(policy).folder / "modules.py"
    edited.write_text("# mine\n", encoding="utf-8")
    with pytest.raises(loka.CheckFailedError, match=r"generated/small/modules.py: edited: change the policy instead"):
        loka.generate(policy, check=True)
    with pytest.raises(loka.InputError, match="edited"):
        loka.generate(policy)
    assert edited.read_text(encoding="utf-8") == "# mine\n"
    assert "modules.py" in loka.generate(policy, force=True).written
    with pytest.raises(loka.InputError, match="check writes nothing, so that there is nothing to force"):
        loka.generate(policy, check=True, force=True)


def test_a_wrong_policy_has_its_place(policy: Path) -> None:
    policy.write_text(POLICY.replace("compute: fp8", "compute: fp9"), encoding="utf-8")
    with pytest.raises(loka.PolicyError, match=r"small.yaml:4:21: "):
        loka.generate(policy)
    assert not Path("generated").exists()


def test_the_page_is_what_the_docstrings_say() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "api_page.py"))["page"]()
    assert (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8") == page, "run `make docs-api`"


@pytest.mark.parametrize("wrong", [3, None, b"small.yaml", ["small.yaml"], {"version": 1}, loka.load_policy])
def test_what_names_no_policy_is_refused_by_type(wrong: object, policy: Path) -> None:
    kind = "None" if wrong is None else f"a {type(wrong).__name__}"
    calls = (
        lambda: loka.load_policy(wrong),  # type: ignore[arg-type]
        lambda: loka.make_plan(wrong),  # type: ignore[arg-type]
        lambda: loka.generate(wrong),  # type: ignore[arg-type]
        lambda: loka.Probe(small_model(), wrong),  # type: ignore[arg-type]
    )
    for call in calls:
        with pytest.raises(loka.InputError, match=f"must be the path of a policy, a YAML file.*, not {kind}"):
            call()
    assert sorted(path.name for path in policy.parent.iterdir() if path.name != "__pycache__") == [
        "small.yaml",
        "smallmodel.py",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": 3}, "out must be the path of a folder, not a int"),
        ({"out": b"here"}, "out must be the path of a folder, not a bytes"),
        ({"force": "no"}, "force must be True or False, not 'no'"),
        ({"check": 1}, "check must be True or False, not 1"),
    ],
)
def test_arguments_of_generate_have_their_types(arguments: dict[str, object], message: str, policy: Path) -> None:
    with pytest.raises(loka.InputError, match=message):
        loka.generate(policy, **arguments)  # type: ignore[arg-type]
    assert not Path("here").exists()
    assert not Path("generated").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "path must be a path, not a int"),
        ({"path": " "}, "path is empty"),
        ({"path": "a\0b"}, "path holds a NUL"),
        ({"path": "."}, "path: . is a folder; name a file in it"),
        ({"path": "small.yaml/x.safetensors"}, "small.yaml is no folder"),
        ({"group": 3}, "group must be a ProcessGroup of torch.distributed, not a int"),
    ],
)
def test_arguments_of_a_probe_are_known_before_training(
    arguments: dict[str, object], message: str, policy: Path
) -> None:
    with pytest.raises(loka.InputError, match=message):
        loka.Probe(small_model(), policy, **arguments)  # type: ignore[arg-type]


def test_a_probe_of_a_model_without_values_is_refused(policy: Path) -> None:
    with pytest.raises(loka.InputError, match=r"its Parameter '0\.weight' is on the meta device, without values"):
        loka.Probe(small_model().to("meta"), policy)
