"""What a rendered package looks like: formatted, clean, the same bytes everywhere, safe against names."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.codegen import render_package, write_package
from loka.errors import InputError, LokaError
from loka.graph.expression import Arg, Call, Constant
from loka.graph.fingerprint import Fingerprint, PlannedCall
from loka.graph.ir import ForwardIR, Region
from loka.plan.plan import BindingKind, Plan, PlannedBinding
from loka.templating.wrap import WIDTH
from tests.support.codegen import codegen_plans as plans
from tests.support.expressions import expression, site_call, statement

ROOT = Path(__file__).parents[2]
RUFF = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
LONG = (
    "a_module_whose_author_liked_very_long_names_and_gave_it_one_that_fills_more_than_a_line_of_code_all_by_itself_0123"
)


def long_forward() -> ForwardIR:
    """Expressions that fill more than a line, names that are ours, targets that nobody reads, arguments in capitals."""
    far = f"self.{LONG[:60]}.{LONG[:60]}"
    read = (plans.local("cat"), plans.attribute(far + ".weight"))
    statements = (
        statement("torch", "add", "{0} + {1}", (plans.local("X"), plans.attribute(far + ".shift"))),
        statement("Kernels", "mul", "{0}.t() * {1}", (plans.local("torch"), plans.attribute(far + ".gain"))),
        statement("unused", "add_", "{0}.add_({1})", (plans.local("Kernels"), plans.local("l"))),
        statement("_", "module", "self.tables({0})", (plans.local("l"),)),
        statement("unused_too", "shape", "{0}.shape", (plans.local("Kernels"),)),
        statement(
            "cat", "cat", "torch.cat([{0}, {1}], -1)[:, 1:]", (plans.local("Kernels"), plans.attribute(far + ".rest"))
        ),
        statement(
            "linear",
            "einsum",
            "torch.einsum('bk,nk->nb', {0}, {1})",
            read,
            site_call("deep", read, "{0}.reshape(-1, 48)", "{1}.reshape(32, 48)", out="{0}.t().contiguous()"),
        ),
    )
    return ForwardIR(
        "",
        "sample.Deep",
        ("X", "/", "l", "*", "kernels=torch.float32"),
        statements,
        expression("(linear, kernels)"),
        (),
    )


def long_plan() -> Plan:
    deep = PlannedBinding(
        "", BindingKind.FORWARD, ("",), "sample.Deep", (("deep",),), ((f"{LONG}.{LONG}", (32, 48)),), long_forward()
    )
    return plans.make_plan([plans.site_plan("deep")], [deep])


def fused_twice_plan() -> Plan:
    """Two towers of one shape, on paths that differ: one outlined function for both; a third of another recipe."""
    sites, bindings = [], []
    for index, prefix in enumerate(("self.", "self.inner.", "self.")):
        name = f"tower{index}.fc"
        forward = plans.tower_forward(name, prefix)
        sites.append(plans.site_plan(name, k=48, n=48, wgrad=None if index == 2 else (plans.ROWWISE, plans.ROWWISE)))
        shapes = (("fc.weight", (48, 48)),)
        bindings.append(
            PlannedBinding("", BindingKind.FORWARD, (f"tower{index}",), "sample.Tower", ((name,),), shapes, forward)
        )
    return plans.make_plan(sites, bindings)


def no_region_plan() -> Plan:
    """A norm, an FP8 linear and an activation, one by one: the module calls torch itself."""
    plan = plans.forward_plan()
    tower = replace(plan.bindings[0], forward=replace(plans.tower_forward(), regions=()))
    return plans.make_plan([plans.site_plan("tower.fc", k=48, n=48)], [tower])


def read_plan() -> Plan:
    """A forward with a fingerprint: two calls, long names, quotes."""
    plan = plans.forward_plan()
    calls = (
        PlannedCall("(('tuple', ('it\\'s', None)), ('dict', ()))", ("v0 = relu(x)", "return v0"), ("return x",)),
        PlannedCall("((), ())", (f"v0 = linear(x, self.{LONG}.weight)", "return {'a': v0, \"b\": x}")),
    )
    planned = Fingerprint(calls, "float32")
    forward = replace(plans.tower_forward(), fingerprint=planned)
    return replace(plan, bindings=(replace(plan.bindings[0], forward=forward), *plan.bindings[1:]))


SHAPES = {
    "read": read_plan(),
    "no_region": no_region_plan(),
    "linear": plans.linear_plan(),
    "forward": plans.forward_plan(),
    "mixed": plans.mixed_plan(),
    "many": plans.linear_plan([f"layers.{i}.fmb.0" for i in range(40)]),
    "uneven": plans.linear_plan([f"layers.{i * i}.fmb.0" for i in range(40)]),
    "long_names": plans.linear_plan([f"layers.{i}.{LONG}" for i in range(3)]),
    "spaces": plans.linear_plan([f"layers.{i}.{LONG.replace('_', ' ')} # noqa" for i in range(3)]),
    "empty": plans.make_plan([], []),
    "long_forward": long_plan(),
    "fused_twice": fused_twice_plan(),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    for name, plan in SHAPES.items():
        write_package(render_package(plan), folder / name)
    return folder


@pytest.mark.parametrize("command", [["format", "--check", "--diff"], ["check"]])
def test_ruff_has_nothing_to_say(packages: Path, command: list[str]) -> None:
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    result = subprocess.run([RUFF, *command, *config, str(packages)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_shapes_import(packages: Path) -> None:
    for name in SHAPES:
        files = {path.name: path.read_text(encoding="utf-8") for path in (packages / name).iterdir() if path.is_file()}
        package = plans.import_package(files, packages.parent / "imported", f"gen_{name}")
        assert len(package.BINDINGS) == len(SHAPES[name].bindings)
        for binding, planned in zip(package.BINDINGS, SHAPES[name].bindings, strict=True):
            assert (binding.modules, binding.sites) == (planned.modules, planned.sites)
            assert (binding.shapes, binding.replaces) == (planned.shapes, planned.module_type)
            if planned.forward is not None:
                assert binding.fingerprint == planned.forward.fingerprint


def test_files_of_two_generations_do_not_import(tmp_path: Path) -> None:
    older, newer = render_package(SHAPES["linear"]), render_package(SHAPES["forward"])
    for name in ("kernels.py", "modules.py", "__init__.py", "manifest.json"):
        with pytest.raises(InputError, match="run loka generate"):
            plans.import_package({**newer, name: older[name]}, tmp_path, "gen_mixed_up")
    assert plans.import_package(newer, tmp_path, "gen_mixed_up").BINDINGS


def test_equal_regions_share_a_function() -> None:
    files = render_package(SHAPES["fused_twice"])
    assert files["kernels.py"].count("def layer_norm_linear_silu(") == 1
    assert files["kernels.py"].count("def layer_norm_linear_silu_2(") == 1
    assert files["modules.py"].count("kernels.layer_norm_linear_silu(") == 2
    assert "self.inner.fc.weight" in files["modules.py"]


def test_manifest_holds_every_hash() -> None:
    files = render_package(plans.linear_plan())
    manifest = json.loads(files["manifest.json"])
    for name in ("__init__.py", "kernels.py", "modules.py", "plan.json"):
        assert manifest["outputs"][name] == hashlib.sha256(files[name].encode()).hexdigest()
    for name in ("__init__.py", "kernels.py", "modules.py"):
        assert f'STAMP = "{manifest["stamp"]}"' in files[name]
    assert {"policy policies/ranker.yaml", "template kernels.py.j2", "plan.json", "loka"} <= set(manifest["inputs"])


def test_every_input_changes_the_stamp() -> None:
    plan = plans.linear_plan()
    stamps = {
        json.loads(render_package(other)["manifest.json"])["stamp"]
        for other in (
            plan,
            replace(plan, policy_files=(("policies/ranker.yaml", "cd" * 32),)),
            replace(plan, batch_size=128),
            replace(plan, loka_version="9.9"),
        )
    }
    assert len(stamps) == 4


def test_absolute_paths_stay_out() -> None:
    plan = replace(plans.linear_plan(), policy_files=(("/somewhere/else/ranker.yaml", "ab" * 32),))
    text = "".join(text for name, text in render_package(plan).items() if name != "plan.json")
    assert "/somewhere" not in text
    assert "ranker.yaml" in text


@pytest.mark.parametrize("name", ["class", "a-b", "../up", "", "über", "None"])
def test_a_package_needs_an_identifier(name: str) -> None:
    with pytest.raises(InputError, match="identifier"):
        render_package(replace(plans.linear_plan(), name=name))


def test_contradictions_of_a_plan_are_faults() -> None:
    plan = plans.linear_plan()
    with pytest.raises(LokaError, match="mixes recipes"):
        render_package(replace(plan, sites=(plan.sites[0], plans.site_plan("layers.1.fmb.0", wgrad=None))))
    with pytest.raises(LokaError, match="lacks"):
        render_package(replace(plan, sites=plan.sites[:1]))


HOSTILE = st.text(min_size=1, max_size=40) | st.sampled_from(
    [
        '"""; import os; os.system("x") #',
        "'''\\",
        "a\nimport os",
        "{{ 7 * 7 }}",
        "{% raw %}",
        "\\",
        'x"',
        "{0}",
        "\u202e",
        "fmt: off",
        "noqa",
        "__class__",
        "None",
        "\ud800",
    ]
)
PLAIN_NODES = {
    type(node)
    for text in render_package(plans.forward_plan()).values()
    if "import" in text
    for node in ast.walk(ast.parse(text))
}


@pytest.mark.slow
@given(HOSTILE, HOSTILE, HOSTILE)
@settings(max_examples=60, deadline=None)
def test_names_never_become_code(first: str, second: str, third: str) -> None:
    binding = replace(
        plans.linear_binding((f"a.{first}", f"a.{second}"), hint=third, module_type=third),
        shapes=((first, (32, 48)), ("bias", (32,))),
    )
    forward = replace(plans.tower_forward(f"t.{third}"), inlined=(first,), owner_type=first)
    forward = replace(
        forward,
        statements=tuple(replace(statement, note=first, op=second) for statement in forward.statements),
        regions=tuple(Region(region.site, region.first, region.last, (first, second)) for region in forward.regions),
        fingerprint=Fingerprint((PlannedCall(first, (second, third), (third,)),), second),
    )
    tower = PlannedBinding(
        first, BindingKind.FORWARD, (f"t.{second}",), first, ((f"t.{third}",),), ((third, (48, 48)),), forward
    )
    sites = {name: plans.site_plan(name) for name in (f"a.{first}", f"a.{second}", f"t.{third}")}
    plan = replace(plans.make_plan(list(sites.values()), [binding, tower]), policy_files=((first, "0"),))
    for name, text in render_package(plan, "{}\n").items():
        text.encode("ascii")
        if name.endswith(".py"):
            tree = ast.parse(text)
            # A long list of names may become tuple(f"..." for i in range(...)); nothing else is new.
            assert {type(node) for node in ast.walk(tree)} <= PLAIN_NODES
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert {getattr(node, "module", None) or node.names[0].name for node in imports} <= {
                "__future__",
                "torch",
                "torch.autograd.function",
                "typing",
                "loka",
                "kernels",
            }
            assert len(text.split("\n")) < 400
            if name == "__init__.py":
                strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
                assert {f"a.{first}", f"a.{second}", f"t.{second}"} <= strings


@pytest.mark.parametrize(
    "value",
    [
        *(Constant("__import__('os')"), Call("eval", ("1",)), Call("os.getcwd"), Call("open", ("x",))),
        *(Call("getattr", (Constant("kernels"), "STAMP")), Call("operator.add", (Call("os.getcwd"), 1))),
    ],
)
def test_statements_read_only_torch_and_their_operands(value: Arg) -> None:
    forward = plans.tower_forward()
    statements = (*forward.statements[:3], replace(forward.statements[3], value=value))
    plan = plans.forward_plan()
    tower = replace(plan.bindings[0], forward=replace(forward, statements=statements))
    with pytest.raises(LokaError, match="unknown"):
        render_package(replace(plan, bindings=(tower, plan.bindings[1])))


@pytest.mark.slow
def test_ten_thousand_layers_in_two_seconds(tmp_path: Path) -> None:
    names = [f"layers.{i}.fc" for i in range(10_000)]
    plan = plans.linear_plan(names)
    render_package(plans.linear_plan())  # templates are compiled once for each process
    gc.disable()  # as in `loka generate`: what other tests have left is not what is measured
    try:
        started = time.process_time()
        write_package(render_package(plan), tmp_path / "wide")
        assert time.process_time() - started < 2.0
    finally:
        gc.enable()
    assert max(map(len, (tmp_path / "wide" / "__init__.py").read_text().split("\n"))) <= WIDTH
