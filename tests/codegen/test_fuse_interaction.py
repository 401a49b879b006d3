"""`fuse_interaction` from the policy to training: what is fused, for whom, that it is exact, and what is refused."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import chain_plans as chains
import codegen_plans as plans
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.codegen import render_package
from loka.errors import InputError
from loka.plan.make import make_plan
from loka.plan.plan import Plan
from loka.plan.serial import from_json, to_json

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.errors.LokaWarning")  # that this is the CPU

MODELS = """
import torch
from torch import nn
from loka.zoo.dlrm import DCNSizes, DCNv2, DLRM
from loka.zoo.wukong import Wukong, WukongSizes

def seeded(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model

def dcnv2():
    return seeded(DCNv2(DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48))))

def inputs(batch):
    return (torch.randn(batch, 6, 16, generator=torch.Generator().manual_seed(1)),)

class Hidden(DCNv2):
    def forward(self, embeddings):
        with torch.no_grad():  # a forward that is not traced
            embeddings.sum()
        return super().forward(embeddings)

def hidden():
    return seeded(Hidden(DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48))))

class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(96, 96)

    def forward(self, x):
        return (x * self.linear(x) + x).relu_()

class Relu(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Flatten(), InPlace(), nn.Linear(96, 1)

    def forward(self, x):
        return self.last(self.body(self.first(x)))

def in_place():
    return seeded(Relu())

def tower():
    return seeded(nn.Sequential(nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1)))

class Pairs(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rank, self.last = nn.Parameter(torch.randn(16, 4)), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank)).flatten(1))

def thick():
    return seeded(Pairs(2304))

def thick_inputs(batch):
    return (torch.randn(batch, 16, 2304),)

def thin_inputs(batch):
    return (torch.randn(batch, 16, 64),)

SIZES = {}

def sized():
    if "rank" in SIZES and "dim" in SIZES and SIZES["kind"] == "wukong":
        sizes = {key: SIZES[key] for key in ("embeddings", "dim", "layers", "rank", "mods")}
        return seeded(Wukong(WukongSizes(**sizes, hidden=32)))
    sizes = {key: SIZES[key] for key in ("embeddings", "dim", "layers", "rank")}
    return seeded(DCNv2(DCNSizes(**sizes, over=(24,))))

def sized_inputs(batch):
    return (torch.randn(batch, SIZES["embeddings"], SIZES["dim"], generator=torch.Generator().manual_seed(1)),)
"""


class Workplace:
    """Makes packages of the models above, and forgets them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._names = folder, ["fused_models"]
        (folder / "fused_models.py").write_text(MODELS)
        self.models = importlib.import_module("fused_models")

    def make(
        self,
        factory: str,
        defaults: str = "compute: keep",
        mods: str = "{use: fuse_interaction}",
        inputs: str = "inputs",
    ) -> tuple[Plan, dict[str, str], ModuleType]:
        (self._folder / "policy.yaml").write_text(
            f'version: 1\nname: crossing\nmodel: {{factory: "fused_models:{factory}", inputs: "fused_models:{inputs}", '
            f"batch_size: 32}}\ndefaults: {{{defaults}}}\nmods: [{mods}]\n"
        )
        plan = make_plan("policy.yaml")
        files = render_package(plan)
        self._names.append(f"gen_fused_{len(self._names)}")
        return plan, files, plans.import_package(files, self._folder, self._names[-1])

    def forget(self) -> None:
        for name in self._names:
            for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                sys.modules.pop(module)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("fused_models", None)
    made = Workplace(tmp_path)
    yield made
    made.forget()


def equal_but_for_rounding(model: nn.Module, package: ModuleType, x: Tensor, limit: float = 2e-5) -> None:
    """That a patched model gives the outputs and all gradients of the model in float64."""
    dy = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(2))
    exact = chains.gradients(copy.deepcopy(model).double(), x.double(), dy.double())
    keys = model.state_dict().keys()
    with package.apply(model):
        assert model.state_dict().keys() == keys
        found = chains.gradients(model, x, dy)
    assert found.keys() == exact.keys()
    for key, value in found.items():
        assert (value.double() - exact[key]).norm() <= limit * exact[key].norm() + 1e-9, key


def test_cross_layers_of_a_model_that_is_kept_are_fused_and_exact(workplace: Workplace) -> None:
    plan, files, package = workplace.make("dcnv2")
    assert [binding.modules for binding in plan.bindings] == [("",)]
    text = files["modules.py"]
    assert "up = torch.nn.functional.linear(down, self.cross[0].up.weight)\n" in text
    assert "add, flatten_passed = kernels.cross_itself_96_passing(up, self.cross[0].up.bias, flatten)" in text
    assert "add_2 = kernels.cross_96(up_2, self.cross[2].up.bias, " in text
    assert {site.site.name: site.region for site in plan.sites}["cross.1.up"] == ("linear", "mul", "add")
    model = workplace.models.dcnv2()
    for batch in (33, 1):
        equal_but_for_rounding(model, package, torch.randn(batch, 6, 16))
    assert type(model).__name__ == "DCNv2"


def test_what_a_plan_file_has_renders_the_same(workplace: Workplace) -> None:
    plan, files, _ = workplace.make("dcnv2")
    assert '"crosses"' in to_json(plan)
    assert render_package(from_json(to_json(plan))) == files


def test_one_layer_of_those_that_match(workplace: Workplace) -> None:
    _, files, package = workplace.make("dcnv2", mods='{use: fuse_interaction, match: "cross.1"}')
    assert files["modules.py"].count("kernels.cross_96(") == 2  # for training and frozen
    assert "passing" not in files["modules.py"]
    equal_but_for_rounding(workplace.models.dcnv2(), package, torch.randn(9, 6, 16))


def test_where_the_whole_cannot_be_traced_each_layer_is_fused_alone(workplace: Workplace) -> None:
    plan, files, package = workplace.make("hidden")
    assert {name for binding in plan.bindings for name in binding.modules} == {"cross.0", "cross.1", "cross.2"}
    assert "return kernels.cross_96(up, self.up.bias, x0, x)" in files["modules.py"]
    equal_but_for_rounding(workplace.models.hidden(), package, torch.randn(9, 6, 16))


@pytest.mark.parametrize("fuse", ["auto", "always"])
def test_beside_linears_in_fp8(workplace: Workplace, fuse: str) -> None:
    rules = f"compute: fp8, scaling: rowwise, fuse: {fuse}"
    _, files, package = workplace.make("dcnv2", rules)
    assert "kernels.cross_96_passing(up_1, self.cross[1].up.bias, flatten_passed, add)" in files["modules.py"]
    _, _, alone = workplace.make("dcnv2", f"{rules.replace('always', 'never')}", "")
    model, x, dy = workplace.models.dcnv2(), torch.randn(17, 6, 16), torch.randn(17, 1)
    with alone.apply(model):
        expected = chains.gradients(model, x, dy)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    for key, value in found.items():  # a sum that is rounded once may fall to the other side of an FP8 value
        assert chains.error(value, expected[key].double()) < 0.03, key
    with package.apply(model, mode="infer") as patch, torch.no_grad():
        assert chains.error(model(x), expected["y"].double()) < 0.03
        patch.verify(backward=False)


def test_in_a_chain_the_chain_has_it(workplace: Workplace) -> None:
    _, files, _ = workplace.make(
        "dcnv2", "compute: fp8, scaling: rowwise, power_of_two: true, turned: true, fuse: always"
    )
    assert "kernels.cross" not in files["modules.py"]
    assert "kernels.linear_to_" in files["modules.py"]


def test_compiled_under_autocast_and_without_gradients(workplace: Workplace) -> None:
    _, _, package = workplace.make("dcnv2")
    model = workplace.models.dcnv2()
    x, dy = torch.randn(8, 6, 16), torch.randn(8, 1)
    exact = chains.gradients(copy.deepcopy(model), x, dy)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    try:
        with package.apply(model):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            found = chains.gradients(compiled, x, dy)
            for key, value in exact.items():
                torch.testing.assert_close(found.get(key, found.get(f"_orig_mod.{key}")), value, atol=1e-5, rtol=1e-4)
            with torch.autocast("cpu", torch.bfloat16):
                cast = model(x)
                cast.sum().backward()
            assert cast.dtype == plain.dtype
            assert (cast - plain).norm() <= 0.02 * plain.norm()
            model.cross[1].up.bias.requires_grad_(False)
            model.zero_grad()
            model(x).sum().backward()
            assert model.cross[1].up.bias.grad is None
            assert model.cross[0].up.bias.grad is not None
    finally:
        torch._dynamo.reset()


SHAPES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["wukong", "dcn"]),
        "embeddings": st.sampled_from([6, 10, 16]),
        "dim": st.integers(3, 20),
        "layers": st.integers(1, 3),
        "rank": st.integers(1, 6),
        "mods": st.booleans(),
    }
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, batch=st.integers(1, 9))
def test_any_shape_is_the_same_function(workplace: Workplace, shape: dict[str, object], batch: int) -> None:
    workplace.models.SIZES.clear()
    workplace.models.SIZES.update(shape)
    _, files, package = workplace.make("sized", inputs="sized_inputs")
    wukong = shape["kind"] == "wukong"
    for kind in ("mix_", "join_") if wukong else ("cross_",):
        assert f"kernels.{kind}" in files["modules.py"], kind
    x = workplace.models.sized_inputs(batch)[0]
    equal_but_for_rounding(workplace.models.sized(), package, x, limit=2e-4)


@pytest.mark.parametrize(
    ("factory", "mods", "said"),
    [
        ("tower", "{use: fuse_interaction}", "policy.yaml:5:8: mod 1: fuse_interaction fuses nothing: nothing that it"),
        ("dcnv2", '{use: fuse_interaction, match: "crosses.*"}', "no module is called 'crosses.*'; near it are cross"),
        ("dcnv2", '{use: fuse_interaction, match: "over"}', "fuses nothing: nothing that it matches mixes"),
        ("in_place", '{use: fuse_interaction, match: "body"}', "'body': its forward changes a tensor in place: "),
        ("dcnv2", '{use: fuse_interaction}, {use: fuse_interaction, match: "cross.*"}', "mod 2: fuse_interaction asks"),
    ],
)  # fmt: skip
def test_what_cannot_be_fused_is_an_error_at_its_place(
    workplace: Workplace, factory: str, mods: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        workplace.make(factory, mods=mods)
    assert said in str(error.value)
    assert str(error.value).startswith("policy.yaml:5:")


def test_optional_excuses_it(workplace: Workplace) -> None:
    plan, _, _ = workplace.make("tower", mods="{use: fuse_interaction, optional: true}")
    assert plan.bindings == ()


@pytest.mark.parametrize(
    ("inputs", "compute", "said"),
    [
        ("thick_inputs", "keep", "the model: no kernel mixes 16 embeddings of 2304 at rank 4: a sample may have 32768"),
        (
            "thin_inputs",
            "fp8",
            "the model: its mixing layer multiplies by 'rank' in FP8, and kernels mix in the model's",
        ),
    ],
)
def test_sizes_without_a_kernel_and_sites_in_fp8_are_named(
    workplace: Workplace, inputs: str, compute: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        workplace.make("thick", f"compute: {compute}", inputs=inputs)
    assert said in str(error.value)
