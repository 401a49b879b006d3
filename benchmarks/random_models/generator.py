"""Draws random models: the text of a module with `build`, `example_inputs`, `change` and `restore`."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import Template

from benchmarks.random_models.construct import ACTIVATIONS, BLOCK, FACTORS, LAYERS, Lines
from benchmarks.random_models.objects import OF_PYTHON
from benchmarks.random_models.plain import PLAIN
from benchmarks.random_models.states import STATES

ODD = {**STATES, **OF_PYTHON}
KINDS: dict[str, dict[str, Lines]] = {**PLAIN, **ODD}
CORE = ("layers", "block")  # what every planner binds, so that there is something to compare

HEADER = '''\
"""{title}"""
import collections, contextlib, dataclasses, enum, functools, itertools, logging, math, os, random, types
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Pair = collections.namedtuple("Pair", "x ids")

@dataclasses.dataclass
class Batch:
    x: object
    ids: object

def dense(n):
    return torch.randn(n, 16)

def ids(n):
    return torch.randint(0, 20, (n, 4))
'''

# Name -> arguments of forward, its first lines, what `example_inputs(n)` returns
INPUTS = {
    "two": ("x, ids", "", "dense(n), ids(n)"),
    "keywords": ("*, x, ids", "", "{'x': dense(n), 'ids': ids(n)}"),
    "optional": ("x, ids, weight=None", "if weight is not None:\n    x = x * weight", "dense(n), ids(n)"),
    "optional given": ("x, ids, weight=None", "if weight is not None:\n    x = x * weight",
                       "dense(n), ids(n), torch.rand(n, 1)"),
    "None": ("x, weight, ids", "x = x if weight is None else x * weight", "dense(n), None, ids(n)"),
    "flag": ("x, ids, double", "x = x * 2 if double else x", "dense(n), ids(n), True"),
    "default": ("x, ids, scale=2.0", "x = x * scale", "dense(n), ids(n)"),
    "dict": ("batch", "x, ids = batch['x'], batch['ids']", "({'x': dense(n), 'ids': ids(n)},)"),
    "tuple": ("batch", "x, ids = batch", "((dense(n), ids(n)),)"),
    "nested": ("batch", "x, ids = torch.cat(batch['x'], dim=1), batch['sparse']['ids']",
               "({'x': [dense(n)[:, :8], dense(n)[:, :8]], 'sparse': {'ids': ids(n)}},)"),
    "dataclass": ("batch", "x, ids = batch.x, batch.ids", "(Batch(dense(n), ids(n)),)"),
    "named tuple": ("batch", "x, ids = batch.x, batch.ids", "(Pair(dense(n), ids(n)),)"),
    "args": ("*features", "x, ids = features", "dense(n), ids(n)"),
    "kwargs": ("x, **features", "ids = features['ids']", "{'x': dense(n), 'ids': ids(n)}"),
}  # fmt: skip
OUTPUTS = {
    "tensor": "x",
    "score": "x.abs().sum(-1)",  # what adds up to nearly nothing is mostly rounding
    "loss": "x.square().mean()",
    "tuple": "x, first",
    "list": "[x, None]",
    "dict": "{'x': x, 'first': first}",
    "nested": "{'scores': (x, [first]), 'loss': None}",
    "named tuple": "Pair(x, first)",
    "dataclass": "Batch(x, first)",
    "number": "x, x.shape[0]",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A construct at a place of a model."""

    kind: str
    name: str
    owner: int  # 0: the model; others: a block of its own
    number: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model as a list of steps; each says the same whatever the others are."""

    seed: int
    steps: tuple[Step, ...]
    inputs: str = "two"
    outputs: str = "tensor"

    def without(self, step: Step) -> RandomModel:
        """The model without a step."""
        return replace(self, steps=tuple(each for each in self.steps if each != step))

    def source(self) -> str:
        """The text of its module: `build()`, `example_inputs(n)`, `change(model)` and `restore()`."""
        texts = {step: _texts(step, self.seed) for step in self.steps}
        arguments, first, example = INPUTS[self.inputs]
        owners = sorted({step.owner for step in self.steps} - {0})
        classes = [_class(f"Block{owner}", "x", "", self._of(owner), texts, "return x") for owner in owners]
        result = f"return {OUTPUTS[self.outputs]}"
        model = _class("Model", arguments, first, self.steps, texts, result)
        title = f"Seed {self.seed}: {'; '.join(map(str, self.steps))}; {self.inputs} -> {self.outputs}."
        changes = [
            f"self = {_path('model', step.owner)}\n{texts[step].change}" for step in self.steps if texts[step].change
        ]
        restores = [texts[step].restore for step in self.steps if texts[step].restore]
        functions = (
            "def build():\n    torch.manual_seed(0)\n    return Model()",
            f"def example_inputs(n):\n    return {example}",
            _function("change(model)", "\n".join(changes) or "pass"),
            _function("restore()", "\n".join(restores) or "pass"),
        )
        tops = [texts[step].top for step in self.steps if texts[step].top]
        return "\n\n".join((HEADER.format(title=title), *tops, *classes, model, *functions)) + "\n"

    @property
    def changes(self) -> bool:
        """True if `change` does something."""
        return any(KINDS[step.kind][step.name].change for step in self.steps)

    def _of(self, owner: int) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.owner == owner)


def draw(seed: int) -> RandomModel:
    """A random model: one to three odd constructs among plain ones."""
    rng = random.Random(seed)
    chosen = [CORE]
    for tables, count in ((ODD, rng.choice((1, 1, 2, 3))), (PLAIN, rng.randint(1, 3))):
        for kind in rng.choices(list(tables), k=count):
            chosen.append((kind, rng.choice(list(tables[kind]))))
    chosen = list(dict.fromkeys(chosen))
    rng.shuffle(chosen)
    blocks = rng.choice((0, 1, 1, 2))
    steps = []
    for number, (kind, name) in enumerate(chosen, 1):
        owner = 0 if "ids" in KINDS[kind][name] else rng.randint(0, blocks)
        steps.append(Step(kind, name, owner, number))
    plain_ends = rng.random() < 0.5  # odd inputs and outputs hide other kinds from a planner that refuses them
    inputs, outputs = ("two", "tensor") if plain_ends else (rng.choice(list(INPUTS)), rng.choice(list(OUTPUTS)))
    return RandomModel(seed, tuple(steps), inputs, outputs)


def _texts(step: Step, seed: int) -> Lines:
    """Its construct with every name filled in."""
    construct, k = KINDS[step.kind][step.name], step.number
    rng = random.Random(f"{seed} {k}")
    names = {"k": str(k), "x": f"x{k}", "y": f"y{k}", "ids": "ids", "c": str(rng.choice(FACTORS))}
    names |= {"act": rng.choice(ACTIVATIONS), **{name: f"self.{name}{k}" for name in LAYERS}}
    names["f"] = Template(BLOCK).substitute(names)
    used = [name for name in LAYERS if name in construct or ("f" in construct and name in Lines(BLOCK))]
    layers = "".join(f"self.{name}{k} = {LAYERS[name]}\n" for name in used)

    def filled(text: str) -> str:
        return Template(textwrap.dedent(text).strip()).substitute(names)

    return Lines(
        filled(construct.forward),
        layers + filled(construct.init),
        *map(filled, (construct.methods, construct.top, construct.change, construct.restore)),
    )


def _class(name: str, arguments: str, first: str, steps: Sequence[Step], texts: dict[Step, Lines], result: str) -> str:
    """A class; steps of other owners are calls of these where `name` is the model's."""
    init, methods, lines, called = ["super().__init__()"], [], [first] if first else [], set[int]()
    for step in steps:
        text = texts[step]
        if name == "Model" and step.owner:
            if step.owner not in called:
                called.add(step.owner)
                init.append(f"self.block{step.owner} = Block{step.owner}()")
                lines.append(f"x = self.block{step.owner}(x)")
        else:
            init.append(text.init)
            methods.append(text.methods)
            lines.append(f"x{step.number} = x\n{text.forward}\nx = y{step.number}")
        if step is steps[0]:
            lines.append("first = x")
    parts = [_function("__init__(self)", "\n".join(filter(None, init))), *filter(None, methods)]
    parts.append(_function(f"forward(self, {arguments})", "\n".join([*lines, result])))
    return f"class {name}(nn.Module):\n" + textwrap.indent("\n\n".join(parts), "    ")


def _function(head: str, body: str) -> str:
    return f"def {head}:\n" + textwrap.indent(body, "    ")


def _path(model: str, owner: int) -> str:
    return f"{model}.block{owner}" if owner else model
