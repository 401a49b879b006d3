"""What the tests of rendered kernels share: specs, packages of them, data, and a float64 oracle by autograd."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.kernels.fused.kernel_values import LARGEST_HELD
from loka.kernels.fused.launching import launch
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose, Transpose
from loka.kernels.fused.norm.norm_spec import GATES, NormBackward, NormForward, Spec
from loka.kernels.fused.quantize_weights import QuantizeWeights
from loka.kernels.fused.rendering import Rendered, render_all, render_files
from loka.templating.templates import load_templates
from tests.support.importing import import_folder

# norm, weight, bias, activation, add
PARTS = [
    ("layer_norm", True, True, None, False),
    ("layer_norm", True, True, "silu", True),
    ("layer_norm", True, True, "sigmoid", False),
    ("layer_norm", True, False, "gelu", True),
    ("layer_norm", False, False, "hardswish", False),
    ("rms_norm", True, False, None, False),
    ("rms_norm", True, True, "sigmoid", True),
    ("rms_norm", False, False, "relu", False),
    ("layer_norm", True, True, "gate_sigmoid", True),
    ("layer_norm", True, False, "gate_hardsigmoid", False),
    ("rms_norm", True, False, "gate_hardsigmoid", True),
    (None, False, False, "silu", True),
    (None, False, False, "sigmoid", False),
    (None, False, False, "relu", True),
    (None, False, False, "tanh", True),
    (None, False, False, "leaky_relu", True),
    ("rms_norm", True, False, "leaky_relu(0.2)", True),  # of a sign that rounding does not change
    (None, False, False, None, True),
    (None, False, False, None, False),
]

BLOCK_PARTS = [
    ("block_norm", False, False, None, False),
    ("block_norm", False, False, "hardswish", True),
    ("block_norm", False, False, "hardswish", False),
    ("block_norm", False, False, "sigmoid", False),
    ("block_norm", False, False, "gate_sigmoid", False),
    ("block_norm", False, False, "gate_hardsigmoid", True),
]


def norm_specs(width: int, parts: Sequence[tuple[str | None, bool, bool, str | None, bool]]) -> list[Spec]:
    """Every forward and backward of these parts, quantized and not, that has something to compute."""
    specs: list[Spec] = []
    for norm, weight, bias, activation, add in parts:
        for quantize in (True, False):
            if norm or activation or add or quantize:
                specs.append(NormForward(width, norm, weight, bias, 1e-5, activation, add, quantize, save=True))
            if norm or activation or quantize:
                specs.append(NormBackward(width, norm, weight, bias, 1e-5, activation, add, quantize))
            takes = norm in ("layer_norm", "rms_norm") or (norm is None and activation is not None)
            if takes and activation not in GATES and width <= LARGEST_HELD:
                specs += [replace(spec, multiplied=True) for spec in specs[-2:]]
    return specs


@dataclass(frozen=True)
class Package:
    """A package of rendered kernels, imported."""

    fused: ModuleType
    kernels: dict[str, Rendered]  # by function

    @property
    def triton_kernels(self) -> ModuleType:
        """The file that imports Triton, imported now."""
        return importlib.import_module(self.fused.__package__ + ".triton_kernels")

    def launch(self, spec: Any, *arguments: object) -> dict[str, Tensor]:
        """The results by name that the kernel fills on the arguments' device, as the operator does on a GPU."""
        operator, given = getattr(self.fused, spec.function).operator, as_taken(spec, arguments)
        made = operator.outputs(*given)
        results = [made] if isinstance(made, Tensor) else made
        operator.launch(self.triton_kernels, results, given, launch)
        return dict(zip(spec.results, results, strict=True))

    def run(self, spec: Spec, *arguments: object) -> dict[str, Tensor]:
        """The operator's results by name."""
        results = getattr(self.fused, spec.function)(*as_taken(spec, arguments))
        return dict(zip(spec.results, results if isinstance(results, tuple | list) else (results,), strict=True))


def as_taken(spec: Any, arguments: Sequence[object]) -> tuple[Any, ...]:
    """Arguments one after another, as the operator takes them: of several operands as a list, partial sums beside the
    dtype of all."""
    match spec:
        case Reduce():
            return list(arguments[::2]), arguments[1]
        case RequantizeTranspose() | Transpose() | QuantizeWeights():
            return (list(arguments),)
    return tuple(arguments)


def write_package(
    folder: Path, specs: Sequence[Spec], launched: RowLaunch | None = None, device: DeviceSpec = DEFAULT
) -> Package:
    """Render `specs` into a package in `folder`, whose last part names it, and import that."""
    templates = load_templates()
    kernels = render_all(specs, launched, device)
    folder.mkdir(parents=True)
    for name, text in {**render_files(kernels, templates, "a test"), "__init__.py": ""}.items():
        (folder / name).write_text(text)
    import_folder(folder)
    fused = importlib.import_module(f"{folder.name}.fused")
    return Package(fused, {kernel.function: kernel for kernel in kernels})


@dataclass(frozen=True)
class Inputs:
    """A norm's arguments in some dtype, by name, and its output's gradient."""

    tensors: dict[str, Tensor]
    grad: Tensor

    def of_step(self) -> list[Tensor]:
        """x, add, weight, bias, grad: what a step of a norm that is not multiplied takes."""
        return [*(self.tensors[name] for name in ("x", "add", "weight", "bias")), self.grad]


def random_inputs(
    rows: int, width: int, dtype: torch.dtype, device: str = "cpu", heavy: bool = False, seed: int = 0
) -> Inputs:
    """x, multiplier, grad (rows, width), add, weight, bias (width,); rows differ in size, `heavy` ones by far."""
    generator = torch.Generator().manual_seed(seed + 7919 * rows + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sizes = torch.logspace(-3, 3, max(rows, 1))[torch.randperm(max(rows, 1), generator=generator)][:rows, None]
    # x below about 20: a float32 1 - sigmoid(x) is zero beyond that, and says nothing.
    x, grad = (normal(rows, width) + normal(rows, 1)) * sizes.sqrt() / 8.0, normal(rows, width) * sizes.flip(0)
    if heavy:  # the square root of a Cauchy's size: tails of a Student t with two degrees of freedom
        x, grad = (m * (normal(rows, width) / normal(rows, width)).abs().sqrt().clamp(max=1e3) for m in (x, grad))
    tensors = {"x": x, "add": normal(width), "weight": 0.5 + normal(width).abs(), "bias": 0.3 * normal(width)}
    tensors["multiplier"] = normal(rows, width)
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return Inputs(moved, grad.to(device, dtype))


def exact_forward(spec: NormForward | NormBackward, tensors: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    """The output in float64, by torch's own functions; differentiable."""
    y = tensors["x"]
    if spec.add:
        y = y + tensors["add"]
    taken = y
    weight, bias = (tensors[name] if getattr(spec, name) else None for name in ("weight", "bias"))
    if spec.norm == "layer_norm":
        y = F.layer_norm(y, (spec.width,), weight, bias, eps)
    elif spec.norm == "rms_norm":
        y = F.rms_norm(y, (spec.width,), weight, eps)
        y = y if bias is None else y + bias
    elif spec.norm == "block_norm":
        y = F.rms_norm(y.unflatten(-1, (-1, spec.block)), (spec.block,), None, eps).flatten(-2)
    gates = {"gate_sigmoid": torch.sigmoid, "gate_hardsigmoid": F.hardsigmoid}
    y = taken * gates[spec.activation](y) if spec.activation in gates else exact_activation(spec.activation, y)
    return y * tensors["multiplier"] if spec.multiplied else y


def exact_activation(activation: str | None, z: Tensor) -> Tensor:
    """An activation that is no gate, by torch's own function."""
    functions = {"relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "hardswish": F.hardswish, "gelu": F.gelu}
    functions |= {
        "tanh": torch.tanh,
        "leaky_relu": F.leaky_relu,
        "leaky_relu(0.2)": partial(F.leaky_relu, negative_slope=0.2),
    }
    return functions[activation](z) if activation else z


def exact_gradients(spec: NormBackward, inputs: Inputs, eps: float = 1e-5) -> dict[str, Tensor]:
    """dx, dweight, dbias, dadd, dmultiplier in float64, by autograd."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.tensors.items()}
    output = exact_forward(spec, leaves, eps)
    names = ["x", *(name for name in ("weight", "bias", "add") if getattr(spec, name))]
    names += ["multiplier"] if spec.multiplied else []
    gradients = torch.autograd.grad(output, [leaves[name] for name in names], inputs.grad.double())
    return {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}


def exact_statistics(
    spec: NormForward | NormBackward, tensors: dict[str, Tensor], eps: float = 1e-5
) -> dict[str, Tensor]:
    """mean and rstd in float64, those that the spec's norm has."""
    x = tensors["x"].double()
    if spec.add:
        x = x + tensors["add"].double()
    if spec.norm == "layer_norm":
        mean = x.mean(1)
        return {"mean": mean, "rstd": ((x - mean[:, None]).square().mean(1) + eps).rsqrt()}
    return {"rstd": (x.square().mean(1) + eps).rsqrt()} if spec.norm == "rms_norm" else {}


def largest_rstd(spec: NormForward | NormBackward, tensors: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    """The factor (M, 1) by which a norm can enlarge a gradient: of a block_norm that of the row's smallest block."""
    if spec.norm == "block_norm":
        x = tensors["x"].double() + (tensors["add"].double() if spec.add else 0.0)
        return (x.unflatten(1, (-1, spec.block)).square().mean(2) + eps).rsqrt().amax(1, keepdim=True)
    return exact_statistics(spec, tensors, eps)["rstd"][:, None]


def exact_output(spec: NormForward | NormBackward, inputs: Inputs) -> Tensor:
    """What a spec's kernel quantizes (M, width), in float64."""
    if isinstance(spec, NormBackward):
        return exact_gradients(spec, inputs)["dx"]
    return exact_forward(spec, {name: tensor.double() for name, tensor in inputs.tensors.items()})


def rounding_of(spec: NormForward | NormBackward, inputs: Inputs, exact: Tensor) -> Tensor:
    """How far float32 arithmetic may be from `exact`, by row (M, 1) or element: a few units in the last place."""
    if spec.norm is None and spec.activation in (None, "relu") and not spec.multiplied:
        return torch.zeros_like(exact)
    if isinstance(spec, NormForward):
        return 2.0**-21 * exact.abs().amax(1, keepdim=True)
    if spec.norm is None and spec.activation not in GATES:
        return 2.0**-21 * 1.5 * _product_grad(spec, inputs)
    return 2.0**-21 * gradient_size(spec, inputs)


def _product_grad(spec: NormBackward, inputs: Inputs) -> Tensor:
    """The size (M, width) in float64 of the gradient of what is multiplied, or of the result."""
    grad = inputs.grad.double().abs()
    return grad * inputs.tensors["multiplier"].double().abs() if spec.multiplied else grad


def gradient_size(spec: NormBackward, inputs: Inputs) -> Tensor:
    """An upper bound of dx's terms (M, 1) in float64, which cancel where grad lies along the norm's input."""
    grad = _product_grad(spec, inputs).amax(1, keepdim=True)
    size = 1.5 * grad  # no activation is steeper: this is hard swish at 3
    if spec.activation in GATES:  # a sigmoid's slope is 1/4 at most, times what the norm took
        size = (
            0.25 * grad * (inputs.tensors["x"].double().abs() + inputs.tensors["add"].double().abs()).amax(1)[:, None]
        )
    if spec.weight:
        size = size * inputs.tensors["weight"].double().abs().max()
    size = size * largest_rstd(spec, inputs.tensors) if spec.norm else size
    return size + grad if spec.activation in GATES else size


def arguments_of(spec: NormForward | NormBackward, inputs: Inputs, eps: float = 1e-5) -> list[Tensor]:
    """The operator's tensor arguments, without those of its quantization."""
    known = {**inputs.tensors, "grad": inputs.grad}
    if isinstance(spec, NormBackward):
        known |= {name: t.float() for name, t in exact_statistics(spec, inputs.tensors, eps).items()}
    return [known[name] for name in spec.parameters if name not in ("scale", "overflow_stats", "maxima")]


def reads_sixteen_bytes(ptx: str) -> bool:
    """Whether a compiled kernel reads 16 bytes at a time, into registers or into shared memory."""
    return "ld.global.v4.b32" in ptx or re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,", ptx) is not None
