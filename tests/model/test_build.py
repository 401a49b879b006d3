"""Building a model from the names in a policy, and every mistake in them."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import nn

from loka.errors import InputError
from loka.model.build_model import BuiltModel, build_model, light, light_copy
from loka.model.large_tensors import LargeToMeta

numbers = itertools.count()

GOOD = """
import torch
from torch import nn

class Ranker(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.ReLU())

def build():
    return Ranker()

def inputs(batch_size):
    return (torch.randn(batch_size, 8),)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(text)`: a module in the current directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> str:
        name = f"loka_built_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return run


def test_a_factory_and_its_inputs(write):
    name = write(GOOD)
    path = list(sys.path)
    built = build_model(f"{name}:build", f"{name}:inputs", 5)
    assert isinstance(built.module, nn.Sequential)
    assert (built.args[0].shape, built.kwargs, built.batch_size) == ((5, 8), {}, 5)
    assert sys.path == path


@pytest.mark.parametrize(
    ("body", "args", "kwargs"),
    [
        ("return torch.randn(b, 8)", 1, []),
        ("return (torch.randn(b, 8), torch.randn(b))", 2, []),
        ("return {'input': torch.randn(b, 8)}", 0, ["input"]),
    ],
)
def test_a_tensor_a_tuple_or_a_dict(write, body, args, kwargs):
    name = write(GOOD + f"\ndef example_inputs(b):\n    {body}\n")
    built = build_model(f"{name}:build", None, 5)
    assert (len(built.args), list(built.kwargs)) == (args, kwargs)


def test_the_models_own_example_inputs_come_first(write):
    name = write(
        GOOD.replace("def build", "    def example_inputs(self, b):\n        return torch.ones(b, 8)\n\ndef build")
        + "\ndef example_inputs(b):\n    return torch.zeros(b, 8)\n"
    )
    assert build_model(f"{name}:build", None, 5).args[0].sum() == 40


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("no_colon", r"'no_colon' is not of the form 'package\.module:name'"),
        ("a b:c", r"not of the form"),
        (":build", r"not of the form"),
        ("{name}:", r"not of the form"),
        ("../{name}:build", r"not of the form"),
        ("loka_no_such_module:build", r"there is no module 'loka_no_such_module'.*run this from the project's root"),
        ("{name}.deeper:build", r"there is no module '{name}\.deeper'|importing {name}\.deeper raised"),
        ("{name}:buidl", r"has no 'buidl'; did you mean 'build'\?"),
        ("{name}:zzz", r"has no 'zzz'; check the spelling"),
        ("{name}:torch", r"of type module, not callable"),
        ("{name}:inputs", r"inputs\(\) raised TypeError"),
    ],
)
def test_names_that_lead_nowhere(write, factory, says):
    name = write(GOOD)
    with pytest.raises(InputError, match=rf"^model\.factory: .*({says.format(name=name)})"):
        build_model(factory.format(name=name), f"{name}:inputs", 5)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return None", r"returned None, not an nn\.Module"),
        ("return Ranker", r"returned a type, not an nn\.Module"),
        ("return torch.compile(Ranker())", r"returned a compiled model; return the model that it compiles"),
        ("raise ValueError('no vocabulary')", r"raised ValueError: no vocabulary, at .*{name}\.py:\d+; make this call"),
        ("raise SystemExit(3)", r"raised SystemExit\(3\), at .*{name}\.py:\d+"),
        ("return nn.Linear(-1, 2, device='no')", r"raised RuntimeError: .*{name}\.py:\d+"),
    ],
)
def test_factories_that_fail(write, body, says):
    name = write(GOOD + f"\ndef broken():\n    {body}\n")
    with pytest.raises(InputError, match=r"^model\.factory: .*" + says.format(name=name)):
        build_model(f"{name}:broken", f"{name}:inputs", 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def build(:\n", r"raised SyntaxError: .*{name}\.py:1"),
        ("raise RuntimeError('half')\n", r"raised RuntimeError: half, at .*{name}\.py:1"),
        ("import loka_missing_dependency\n", r"install 'loka_missing_dependency' or correct the import"),
        ("import sys\nsys.exit('bye')\n", r"raised SystemExit\('bye'\)"),
        (
            "from generated import not_yet_there\n",
            r"raised ImportError: .*; import the generated package in the function that trains, not at the top of ",
        ),
    ],
)
def test_modules_that_cannot_be_imported(write, text, says):
    name = write(text)
    with pytest.raises(InputError, match=r"^model\.factory: importing .*" + says.format(name=name)):
        build_model(f"{name}:build", None, 5)


def test_a_script_that_imports_a_package_whose_files_were_changed(write, tmp_path, monkeypatch):
    package = tmp_path / "edited_package"
    package.mkdir()
    (package / "manifest.json").write_text("{}", encoding="utf-8")
    text = "from loka.errors import InputError\nraise InputError('edited: run loka generate again')\n"
    (package / "__init__.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = write("import edited_package\n")
    with pytest.raises(InputError, match=r"edited: run .*; import the generated package in the function that trains"):
        build_model(f"{name}:build", None, 5)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [torch.ones(2)]", r"returned a list; return a tuple"),
        ("return None", r"returned None; return a tuple"),
        (
            "return {'x': [torch.ones(2, device='meta')]}",
            r"returned is on the meta device, without numbers; make it on",
        ),
        ("raise KeyError('ids')", r"raised KeyError: 'ids', at .*{name}\.py"),
    ],
)
def test_inputs_of_a_wrong_kind(write, body, says):
    name = write(GOOD + f"\ndef wrong(b):\n    {body}\n")
    with pytest.raises(InputError, match=r"^model\.inputs: .*" + says.format(name=name)):
        build_model(f"{name}:build", f"{name}:wrong", 5)


def test_a_dict_is_the_one_argument_of_a_forward_that_takes_one_and_names_those_of_another(write):
    text = GOOD + "\ndef keyed(b):\n    return {1: torch.ones(b, 8)}\n"
    name = write(text)
    built = build_model(f"{name}:build", f"{name}:keyed", 5)
    assert ([*built.args[0]], built.kwargs) == ([1], {})
    name = write(text.replace("def build", "    def forward(self, x, y):\n        return x\n\ndef build"))
    with pytest.raises(InputError, match=r"^model\.inputs: .* a dict with the key 1; its keys name arguments"):
        build_model(f"{name}:build", f"{name}:keyed", 5)


def test_no_inputs_at_all(write):
    name = write(GOOD)
    with pytest.raises(
        InputError, match=r"neither Ranker has a method example_inputs\(batch_size\) nor .*name a function"
    ):
        build_model(f"{name}:build", None, 5)


def test_a_batch_of_none(write):
    name = write(GOOD)
    with pytest.raises(InputError, match=r"batch_size: 0 is not"):
        build_model(f"{name}:build", f"{name}:inputs", 0)


def test_ctrl_c_passes_through(write):
    name = write(GOOD + "\ndef stopped():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        build_model(f"{name}:stopped", f"{name}:inputs", 5)


def test_a_lazy_module_that_cannot_be_run_is_refused(write):
    name = write(GOOD + "\ndef lazy():\n    return nn.Sequential(nn.LazyLinear(4), nn.Linear(5, 1))\n")
    with pytest.raises(InputError, match=r"lazy parameter '0\.weight'.*raised RuntimeError"):
        build_model(f"{name}:lazy", f"{name}:inputs", 5)


def test_a_lazy_module_keeps_its_mode(write):
    name = write(GOOD + "\ndef lazy():\n    return nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4))\n")
    model = build_model(f"{name}:lazy", f"{name}:inputs", 5).module
    assert model[0].weight.shape == (4, 8)
    assert all(module.training for module in model.modules())
    assert model[1].num_batches_tracked == 0


def test_large_tables_take_no_memory(write):
    name = write(
        GOOD
        + "\ndef large():\n"
        + "    bag = nn.EmbeddingBag(2**40, 64, device='cpu')\n"
        + "    other = nn.Parameter(torch.zeros((2**40, 4), dtype=torch.float16))\n"
        + "    model = nn.Sequential(bag, nn.Linear(64, 2))\n"
        + "    model.register_parameter('other', other)\n"
        + "    return model.to('cpu')\n"
    )
    model = build_model(f"{name}:large", f"{name}:inputs", 5).module
    assert (model[0].weight.device.type, model[0].weight.shape) == ("meta", (2**40, 64))
    assert (model.other.device.type, model.other.dtype) == ("meta", torch.float16)
    assert model[1].weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("make", "on_meta"),
    [
        (lambda: torch.empty(100), False),
        (lambda: torch.empty(101), True),
        (lambda: torch.zeros(10, 11), True),
        (lambda: torch.ones((10, 11)), True),
        (lambda: torch.rand(size=(101,)), True),
        (lambda: torch.full((101,), 1.0), True),
        (lambda: torch.randint(0, 5, (51,)), True),
        (lambda: torch.randint(0, 5, (50,)), False),
        (lambda: torch.empty(101, dtype=torch.int8), False),
        (lambda: torch.randn(101, generator=torch.Generator()), True),
    ],
)
def test_what_is_large(make, on_meta):
    with LargeToMeta(400):
        made = make()
    assert (made.device.type == "meta") is on_meta


class Held(nn.Module):
    """A Parameter that two modules share, a buffer and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))
        self.notes = [1]


def test_a_light_copy_shares_tensors_and_changes_alone() -> None:
    wide = torch.randn(64, 8192, requires_grad=True)
    built = BuiltModel(Held(), (wide, torch.arange(64)), {"rows": {"x": wide}}, 64)
    copied = light_copy(built)
    assert dict(copied.module.named_parameters()) == dict(built.module.named_parameters())
    assert copied.module.second.weight is built.module.first.weight
    copied.module.second = nn.Identity()
    copied.module.notes.append(2)
    assert isinstance(built.module.second, nn.Linear)
    assert built.module.notes == [1]


def test_large_inputs_of_a_light_model_take_no_memory() -> None:
    wide, whole = torch.randn(64, 8192, requires_grad=True), torch.arange(64)
    made = light(BuiltModel(Held(), (wide, whole), {"x": wide.detach()}, 64))
    stand_in = made.args[0]
    assert (stand_in.shape, stand_in.dtype, stand_in.requires_grad) == (wide.shape, wide.dtype, True)
    assert stand_in.untyped_storage().nbytes() == 4
    assert made.args[1] is whole
    assert not made.kwargs["x"].requires_grad
