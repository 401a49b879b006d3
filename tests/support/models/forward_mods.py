"""Modules whose forwards are rewritten, and how a rewritten forward is compared with the original."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Shape
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.observed_shapes import observed_shapes
from loka.graph.trace.trace import copy_owner, trace_forward
from loka.mods.rewriting.rewriting_tools import Size

Inputs = Callable[[int], tuple[Tensor, ...]]
ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.Sigmoid, nn.GELU)


class Holder(nn.Module):
    """A model with one module whose forward is traced."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> object:
        return self.body(*inputs)


def traced(body: nn.Module, inputs: Inputs) -> tuple[ForwardIR, dict[str, Size], Mapping[str, Shape]]:
    """The forward of a module with all of its children inlined, its linears and Parameters as sites, its shapes."""
    batches = {batch: ModelInputs(inputs(batch), {}) for batch in (5, 8)}
    examples = capture_examples(Holder(body), ["body"], batches)["body"]
    sizes = {n: Size(m.in_features, m.out_features) for n, m in body.named_modules() if isinstance(m, nn.Linear)}
    sizes |= {n: Size(p.shape[1], p.shape[0]) for n, p in body.named_parameters(recurse=False) if p.ndim == 2}
    inline = [name for name, _ in body.named_modules() if name]
    found = trace_forward(body, "", examples, inline=inline, sites=list(sizes))
    assert isinstance(found, ForwardIR), found
    return found, sizes, observed_shapes(found, examples, lambda: copy_owner(body, frozenset(inline)))  # type: ignore[arg-type]


def assert_same(body: nn.Module, rewritten: ForwardIR, inputs: Inputs, batches: tuple[int, ...] = (1, 7)) -> None:
    """Outputs and every gradient agree to rounding in float64, in training and evaluation, at other batch sizes too."""
    for training in (True, False):
        for batch in batches:
            ours = copy.deepcopy(body).double().train(training)
            theirs = with_forward(copy.deepcopy(ours), rewritten)
            args = tuple(x.double() if x.is_floating_point() else x for x in inputs(batch))
            expected, found = _gradients(ours, args), _gradients(theirs, args)
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                if value is None:
                    assert found[name] is None or not found[name].any(), name
                    continue
                assert found[name] is not None, name
                torch.testing.assert_close(
                    found[name], value, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )


def _gradients(module: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    torch.manual_seed(3)
    made = module(*[x * 1 if x.requires_grad else x for x in leaves])
    outputs = [made] if isinstance(made, Tensor) else list(made)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    tensors = {f"input {i}": x for i, x in enumerate(leaves) if x.requires_grad} | dict(module.named_parameters())
    grads = torch.autograd.grad(outputs, list(tensors.values()), weights, allow_unused=True)
    values = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return {**values, **dict(zip(tensors, grads, strict=True))}


class Experts(nn.Module):
    """Experts over one input, as an MMoE has them: with or without a bias, an activation and a gate."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.k, count = draw.randint(1, 40), draw.randint(2, 6)
        self.sizes = [draw.randint(1, 33) for _ in range(count)]
        self.experts = nn.ModuleList([nn.Linear(self.k, n, bias=draw.random() < 0.7) for n in self.sizes])
        self.act = draw.choice(ACTIVATIONS)() if draw.random() < 0.7 else nn.Identity()
        self.w = nn.Parameter(torch.randn(draw.randint(1, 9), self.k))
        self.deep, self.late = draw.random() < 0.5, draw.random() < 0.5
        self.other = nn.Linear(self.k, self.k)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.other(x))
        outs = [self.act(expert(x)) for expert in self.experts]
        outs.append(F.linear(x, self.w))
        if self.late:
            outs.append(x * 2)
        return torch.cat(outs, -1) if self.deep else torch.cat(outs[::-1], -1).sin()

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        torch.manual_seed(batch)
        return (torch.randn(*((batch, 3) if self.late else (batch,)), self.k),)


class Towers(nn.Module):
    """Small linears of one shape over different inputs, given in one of the ways in which models slice them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.way = ("index", "unbind", "chunk", "split", "slice", "list")[seed % 6]
        self.count, self.k, n = draw.randint(3, 7), draw.randint(1, 12), draw.randint(1, 12)
        self.used = draw.randint(3, self.count)
        self.begin = draw.randint(0, self.count - self.used)
        bias = draw.random() < 0.6
        self.towers = nn.ModuleList([nn.Linear(self.k, n, bias=bias) for _ in range(self.used)])
        self.act = draw.choice(ACTIVATIONS)()
        self.deep, self.backwards = draw.random() < 0.5, draw.random() < 0.5
        self.seconds = nn.ModuleList([nn.Linear(n, n, bias=bias) for _ in range(self.used if self.deep else 0)])

    def parts(self, x: Tensor) -> list[Tensor]:
        if self.way == "index":
            return [x[:, i] for i in range(self.count)]
        if self.way == "unbind":
            made = torch.unbind(x, dim=1)
            return [made[i] for i in range(self.count)]
        flat = x.flatten(1)
        if self.way == "chunk":
            made = flat.chunk(self.count, -1)
            return [made[i] for i in range(self.count)]
        if self.way == "split":
            made = torch.split(flat, self.k, dim=1)
            return [made[i] for i in range(self.count)]
        if self.way == "slice":
            return [flat[:, i * self.k : (i + 1) * self.k] for i in range(self.count)]
        return [x[:, i] + i for i in range(self.count)]

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x)[self.begin : self.begin + self.used]
        if self.backwards:
            parts = parts[::-1]
        outs = []
        for i in range(self.used):
            y = self.towers[i](parts[i])
            outs.append(self.seconds[i](self.act(y)) if self.deep else y)
        return torch.stack(outs, 1) * 2

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        torch.manual_seed(batch)
        return (torch.randn(batch, self.count, self.k),)


class Odd(nn.Module):
    """Linears and products with Parameters of odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.k, n, m = (draw.randint(1, 50) for _ in range(3))
        self.first = nn.Linear(self.k, n, bias=draw.random() < 0.6)
        self.norm = nn.LayerNorm(n) if draw.random() < 0.5 else nn.Identity()
        self.second = nn.Parameter(torch.randn(n, m))
        self.left = nn.Parameter(torch.randn(draw.randint(1, 9), self.k))
        self.wide = draw.random() < 0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = F.silu(self.norm(self.first(x))) @ self.second
        return out, self.left @ x.transpose(-1, -2)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        torch.manual_seed(batch)
        return (torch.randn(*((batch, 3) if self.wide else (batch,)), self.k),)
