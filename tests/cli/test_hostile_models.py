"""Models, files and names that are out of the ordinary: a message with a place, status 2, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# what the factory `build` and the inputs are, after shopmodel's own text; then what the message says
MODELS = {
    "a forward that exits": (
        "import sys\nclass Hostile(Shop):\n    def forward(self, x): sys.exit(0)\nbuild = Hostile\n",
        "the model's code raised SystemExit(0), at",
    ),
    "modules that cannot be listed": (
        "class Hostile(Shop):\n    def named_modules(self, *a, **k): raise RuntimeError('mine')\nbuild = Hostile\n",
        "the model's code raised RuntimeError: mine, at",
    ),
    "nested tensors": (
        "def inputs(b): return torch.nested.nested_tensor([torch.randn(2, 13) for _ in range(b)])\n",
        "model.inputs: shopmodel:inputs returned a nested tensor",
    ),
    "a scripted model": (
        "def build(): return torch.jit.script(nn.Sequential(nn.Linear(13, 1)))\n",
        "model.factory: what shopmodel:build() returned is a ScriptModule, whose forward cannot be replaced",
    ),
    "a scripted part": (
        "def build(): return nn.Sequential(nn.Linear(13, 8), torch.jit.script(nn.Linear(8, 1)))\n",
        "model.factory: '1' of shopmodel:build() is a ScriptModule",
    ),
    "a bare linear": ("def build(): return nn.Linear(13, 1)\n", "shopmodel:build() returned a bare Linear"),
    "a linear without outputs": (
        "def build(): return nn.Sequential(nn.Linear(13, 0), nn.Linear(0, 1))\n",
        "model: the weight of '0' has 13 inputs and 0 outputs",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Initializing zero-element tensors",
    "ignore:The PyTorch API of nested tensors",
    "ignore:.*torch.jit.script.* is deprecated",
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_hostile_model_is_refused_with_its_place(kind, shop, refuse):
    text, message = MODELS[kind]
    with open("shopmodel.py", "a", encoding="utf-8") as file:
        file.write(text)
    for arguments in (["generate"], ["generate", "--check"], ["plan", "--json"]):
        sys.modules.pop("shopmodel", None)
        err = refuse(*arguments, shop.policy)
        assert message in err
        assert err.startswith((f"{shop.policy}:3:", "the model's code")), err
        assert len(err) < 1500


def test_a_policy_that_is_valid_has_a_package_of_its_name(shop, loka, policy_text):
    names = ("fused", "print")  # a module of packages, and a built-in function
    for name in names:
        made = loka("generate", shop.write_policy(policy_text.replace("name: shop", f"name: {name}")))
        assert made.status == 0, made.err
    bind = "".join(
        f"import generated.{name} as g, shopmodel; model = shopmodel.build(); patch = g.apply(model); "
        "model(*shopmodel.inputs(64)).sum().backward(); patch.verify()\n"
        for name in names
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, "."])}
    bound = subprocess.run([sys.executable, "-c", bind], capture_output=True, text=True, env=environment, check=False)
    assert bound.returncode == 0, bound.stderr


@pytest.mark.parametrize("field", ["batches", "test", "loss"])
def test_validate_looks_for_what_trains(field, shop, refuse, policy_text):
    policy = shop.write_policy(policy_text.replace(f"  {field}: ", f"  {field}: 'shopmodel:absent' # "))
    err = refuse("validate", policy)
    assert f"train.{field}: shopmodel" in err
    assert "has no 'absent'" in err


@pytest.mark.parametrize("field", ["profile", "measurements"])
@pytest.mark.parametrize("file", ["a pipe", "a" * 5000])
def test_a_file_that_cannot_be_read_is_told_at_its_field(field, file, shop, loka, policy_text):
    os.mkfifo(shop.folder / "policies" / "a pipe")
    policy = shop.write_policy(f"{policy_text}target: h100\n{field}: {file}\n")
    ran = loka("plan", policy)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"{policy}:")
    assert f" {field}: " in ran.err
    assert "cannot be read: " in ran.err
    assert len(ran.err) < 1000


@pytest.mark.parametrize("file", ["modules.py", "manifest.json"])
def test_a_pipe_in_a_package_is_not_waited_for(file, shop, loka):
    assert loka("generate", shop.policy).status == 0
    path = shop.folder / "generated" / "shop" / file
    path.unlink()
    os.mkfifo(path)
    for arguments in (["generate"], ["generate", "--check"]):
        ran = loka(*arguments, shop.policy)
        assert ran.status in (1, 2)
        assert f"generated/shop/{file}: " in ran.err


def test_json_is_alone_on_stdout_whatever_a_factory_prints(shop):
    with open("shopmodel.py", "a", encoding="utf-8") as file:
        file.write(
            "import os, sys\ndef build():\n    print('printed')\n    sys.stdout.write('written\\n')\n"
            "    os.write(1, b'raw\\n')\n    os.system('echo of a child')\n    return Shop()\n"
        )
    ran = subprocess.run(
        [sys.executable, "-m", "loka", "plan", "--json", shop.policy], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["plan"]["name"] == "shop"
    for line in ("printed", "written", "raw", "of a child"):
        assert line in ran.stderr


def test_rows_that_depend_on_the_data_are_planned(shop, loka):
    with open("shopmodel.py", "a", encoding="utf-8") as file:
        file.write(
            "class Masked(Shop):\n    def forward(self, x): return super().forward(x[x.sum(1) > 0])\nbuild = Masked\n"
        )
    ran = loka("plan", "--json", shop.policy)
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["sites"] == 6
