"""Rankers in random spellings: source texts of models that compute the same as a Wukong or a DCNv2 of the zoo.

A seed chooses, for each step, one of the ways in which people write it (`ways_to_write`), and where modules begin and
end. A seed of None is the zoo's way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from tests.support.spellings.ways_to_write import (
    ACTIVATION_MODULES,
    ACTIVATIONS,
    BATCHES,
    BIASED,
    CALLS,
    COLUMNS,
    CONCATENATIONS,
    CROSS_ENDS,
    CROSS_NETS,
    CROSSES,
    FIELDS,
    FLATTENED,
    HELD,
    IN_FIELDS,
    JOINS,
    LINEARS,
    MATRICES,
    MIXED,
    MIXING,
    MULTIPLIED,
    NORMS,
    OF_COLUMNS,
    PAIRS,
    PLAIN_LINEARS,
    ROWS,
    STACKS,
    SUMS,
    TOWERS,
    TRANSPOSES,
    WEIGHTED,
)

N, DIM, RANK, HIDDEN, LAYERS = 16, 32, 8, 64, 2  # of the Wukong
WIDTH, LOW, OVER = 128, 32, 64  # of the DCNv2
FIELD_COUNT = 16  # where its features are fields

Choice = TypeVar("Choice")
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


class Speller:
    """Chooses spellings by a seed, and collects the classes of a model."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._classes: list[str] = []

    def wukong(self) -> str:
        """The text of a module with `Model`, embeddings (B, N, DIM) -> logits (B, 1), and `inputs`."""
        made = N // 2
        tower = self._tower("silu", (N * RANK, HIDDEN, made * DIM), normed=True)
        place, held = self._one(MIXING), self._one(HELD)
        batch = self._one(BATCHES).format("x")
        inner = self._one(MIXED).format("x", self._one(TRANSPOSES).format("x"), "self.rank", batch)
        if held:
            inner = self._one(TRANSPOSES).format(held[1].format("rank", "x"))
        pairs = [f"inner = {inner}", f"products = {self._one(PAIRS).format('x', 'inner')}"]
        machine = [
            f"flat = {self._one(FLATTENED).format('products', N * RANK)}",
            *self._norm("fmb_norm", "flat", N * RANK),
            "interactions = self.fmb(flat)",
            f"interactions = {self._one(ROWS).format('interactions', made, DIM)}",
        ]
        sums = self._one(WEIGHTED).format("self.compress", "x", self._one(BATCHES).format("x"))
        sums = held[1].format("compress", "x") if held else sums
        join = [
            f"joined = {self._one(CONCATENATIONS).format('interactions', 'compressed')}",
            f"joined = {self._one(SUMS).format('joined', 'x')}",
        ]
        rank = [f"self.rank = nn.Parameter(torch.randn({N}, {RANK}) * {N}**-0.5)"]
        compress = [f"self.compress = nn.Parameter(torch.randn({made}, {N}) * {N}**-0.5)"]
        if held:
            rank, compress = (
                [f"self.{name} = {held[0].format(rows, N)}"] for name, rows in (("rank", RANK), ("compress", made))
            )
        tops = [f"self.fmb_norm = nn.LayerNorm({N * RANK})", f"self.fmb = {tower}()"]
        if place in ("pairs", "both"):
            self._add("Pairs", rank, "x", [*pairs, "return products"])
            rank, pairs = ["self.pairs = Pairs()"], ["products = self.pairs(x)"]
        if place in ("sums", "both", "machine"):
            self._add("Compress", compress, "x", [f"return {sums}"])
            compress, sums = ["self.lcb = Compress()"], "self.lcb(x)"
        if place == "machine":
            self._add("Machine", [*rank, *tops], "x", [*pairs, *machine, "return interactions"])
            rank, tops, pairs, machine = ["self.machine = Machine()"], [], [], ["interactions = self.machine(x)"]
        parts, body = [*rank, *compress, *tops], [*pairs, *machine, f"compressed = {sums}", *join]
        self._layer(parts, body)
        head = self._tower("silu", (N * DIM, HIDDEN, HIDDEN, 1), normed=True)
        layers, run = self._stack()
        flat = self._one(FLATTENED).format("x", N * DIM)
        self._add("Model", [*layers, f"self.head = {head}()"], "x", [*run, f"x = {flat}", "return self.head(x)"])
        return self._text(f"(torch.randn(batch, {N}, {DIM}),)")

    def _layer(self, parts: list[str], body: list[str]) -> None:
        """Adds the class of a layer, whose norm is its own or that of a module around it."""
        norm = f"self.norm = nn.LayerNorm({DIM})"
        if self._one(JOINS) == "inside":
            self._add("Layer", [*parts, norm], "x", [*body, *self._norm("norm", "joined", DIM), "return joined"])
            return
        self._add("Body", parts, "x", [*body, "return joined"])
        body = ["joined = self.body(x)", *self._norm("norm", "joined", DIM), "return joined"]
        self._add("Layer", ["self.body = Body()", norm], "x", body)

    def dcnv2(self) -> str:
        """The text of a module with `Model`, features (B, WIDTH) -> logits (B, 1), and `inputs`."""
        over = self._tower("relu", (WIDTH, OVER, OVER, 1), normed=False)
        held = self._one(CROSS_NETS)
        written = {"layers": self._cross_layers, "net": self._cross_layers}
        written |= dict.fromkeys(COLUMNS, lambda: self._cross_columns(held))
        written["fields"] = self._cross_fields
        parts, run = written.get(held, lambda: self._cross_matrices(held))()
        if held == "layers":
            run = ["x = x0", *run]
        else:
            self._add("CrossNet", parts, "x0", ["x = x0", *run, "return x"])
            parts, run = ["self.cross = CrossNet()"], ["x = self.cross(x0)"]
        self._add("Model", [*parts, f"self.over = {over}()"], "x0", [*run, "return self.over(x)"])
        return self._text(f"(torch.randn(batch, {WIDTH}),)")

    def _cross_layers(self) -> tuple[list[str], list[str]]:
        """The attribute with modules of cross layers, and the statements that run them."""
        low, up = self._one(PLAIN_LINEARS).format("down", "x"), self._one(LINEARS).format("up", "low")
        parts = [f"self.down = nn.Linear({WIDTH}, {LOW}, bias=False)", f"self.up = nn.Linear({LOW}, {WIDTH})"]
        inside = self._one(CROSS_ENDS) == "inside"
        times = self._one(MULTIPLIED)
        if times.startswith("self."):
            self._add("Times", [], "a, b", ["return a * b"])
            parts.append("self.times = Times()")
        product = times.format("x0", "u")
        whole = f"{product} + x" if times.startswith("self.") else self._one(CROSSES).format("x0", "u", "x")
        end = whole if inside else product
        self._add("Cross", parts, "x0, x", [f"low = {low}", f"u = {up}", f"return {end}"])
        call = self._one(CALLS).format("layer", "x0", "x")
        run = ["for layer in self.cross:", f"    x = {call if inside else self._one(SUMS).format(call, 'x')}"]
        return [f"self.cross = nn.ModuleList([Cross() for _ in range({LAYERS})])"], run

    def _cross_matrices(self, held: str) -> tuple[list[str], list[str]]:
        """Parameters with the matrices of all cross layers, and the statements that multiply by them."""
        sizes = {"down": f"{LOW}, {WIDTH}", "up": f"{WIDTH}, {LOW}", "bias": f"{WIDTH}"}
        if held == "stacked":
            parts = [f"self.{name} = nn.Parameter(torch.randn({LAYERS}, {size}) * 0.1)" for name, size in sizes.items()]
        else:
            one = "nn.Parameter(torch.randn({}) * 0.1) for _ in range({})"
            parts = [f"self.{name} = nn.ParameterList([{one.format(size, LAYERS)}])" for name, size in sizes.items()]
        zipped = self._flip()
        names = [name if zipped else f"self.{name}[i]" for name in sizes]
        loop = (
            f"for {', '.join(names)} in zip(self.down, self.up, self.bias):" if zipped else f"for i in range({LAYERS}):"
        )
        low = self._one(MATRICES).format(names[0], "x")
        up = self._one(BIASED).format(names[1], "low", names[2])
        end = self._one(CROSSES).format("x0", "u", "x")
        return parts, [loop, f"    low = {low}", f"    u = {up}", f"    x = {end}"]

    def _cross_columns(self, held: str) -> tuple[list[str], list[str]]:
        """Parameters with the matrices of all cross layers, and the statements that multiply columns by them."""
        sizes = {"down": f"{LOW}, {WIDTH}", "up": f"{WIDTH}, {LOW}", "bias": f"{WIDTH}, 1"}
        one = "nn.Parameter(torch.randn({}) * 0.1) for _ in range({})"
        parts = [f"self.{name} = nn.ParameterList([{one.format(size, LAYERS)}])" for name, size in sizes.items()]
        down, up = (self._one(OF_COLUMNS) for _ in range(2))
        body = [
            f"    low = {down.format('self.down[i]', 'x')}",
            f"    u = {up.format('self.up[i]', 'low')} + self.bias[i]",
        ]
        end = self._one([way for way in CROSSES if "einsum" not in way])
        to, back = (self._one(ways) for ways in COLUMNS[held])
        run = [f"x0 = {to.format('x0', WIDTH)}", "x = x0", f"for i in range({LAYERS}):", *body]
        return parts, [*run, f"    x = {end.format('x0', 'u', 'x')}", f"x = {back.format('x')}"]

    def _cross_fields(self) -> tuple[list[str], list[str]]:
        """Parameters of three dimensions for all cross layers, and the statements that multiply blocks by them."""
        fields = {"f": FIELD_COUNT, "d": WIDTH // FIELD_COUNT, "r": LOW}
        one = "nn.Parameter(torch.randn({}) * 0.1) for _ in range({})"
        (down, _, down_order), (_, up, up_order) = self._one(IN_FIELDS), self._one(IN_FIELDS)
        sizes = {"down": down_order, "up": up_order, "bias": "fd"}
        shapes = {name: ", ".join(str(fields[c]) for c in order) for name, order in sizes.items()}
        parts = [f"self.{name} = nn.ParameterList([{one.format(shape, LAYERS)}])" for name, shape in shapes.items()]
        body = [
            f"    low = {down.format('self.down[i]', 'x')}",
            f"    u = {up.format('self.up[i]', 'low')} + self.bias[i]",
        ]
        end = self._one([way for way in CROSSES if "einsum" not in way])
        to, back = (self._one(ways) for ways in FIELDS)
        sizes_of = (fields["f"], fields["d"])
        run = [f"x0 = {to.format('x0', *sizes_of)}", "x = x0", f"for i in range({LAYERS}):", *body]
        return parts, [*run, f"    x = {end.format('x0', 'u', 'x')}", f"x = {back.format('x', *sizes_of)}"]

    def _norm(self, name: str, value: str, width: int | str) -> list[str]:
        """Statements that normalise a local."""
        *before, last = (line.format(name, value, width) for line in self._one(NORMS))
        return [*before, f"{value} = {last}"]

    def _tower(self, kind: str, widths: tuple[int, ...], normed: bool) -> str:
        """Adds a class with linears, norms and activations, and a last linear; its name."""
        pairs, (inputs, outputs) = list(pairwise(widths[:-1])), widths[-2:]
        form = self._one(TOWERS)
        act = f"self.act, self.own = {ACTIVATION_MODULES[kind]}, lambda t: F.relu(t)"
        last = f"self.out = nn.Linear({inputs}, {outputs})"
        if form == "sequential":
            return self._sequential(kind, pairs, f"nn.Linear({inputs}, {outputs})", normed)
        if form == "blocks":
            block = self._block(kind, normed)
            parts = [f"self.hidden = nn.ModuleList([{', '.join(f'{block}({a}, {b})' for a, b in pairs)}])", last]
            body = ["for block in self.hidden:", "    x = block(x)", f"return {self._one(LINEARS).format('out', 'x')}"]
        elif form == "named":
            parts, body = [], []
            for place, (a, b) in enumerate(pairs):
                parts += [f"self.fc{place} = nn.Linear({a}, {b})"]
                parts += [f"self.norm{place} = nn.LayerNorm({b})"] if normed else []
                body.append(f"x = {self._one(LINEARS).format(f'fc{place}', 'x')}")
                body += self._norm(f"norm{place}", "x", b) if normed else []
                body.append(f"x = {self._one(ACTIVATIONS[kind]).format('x')}")
            parts += [last, act]
            body.append(f"return {self._one(LINEARS).format('out', 'x')}")
        else:
            parts = [f"self.fcs = nn.ModuleList([{', '.join(f'nn.Linear({a}, {b})' for a, b in pairs)}])"]
            parts += [f"self.norms = nn.ModuleList([{', '.join(f'nn.LayerNorm({b})' for _, b in pairs)}])"]
            parts += [last, act]
            looped = form == "loop" and normed
            body = ["for fc, norm in zip(self.fcs, self.norms):" if looped else "for i in range(len(self.fcs)):"]
            body += [f"    x = {'fc' if looped else 'self.fcs[i]'}(x)"]
            body += [f"    x = {'norm' if looped else 'self.norms[i]'}(x)"] if normed else []
            body += [f"    x = {self._one(ACTIVATIONS[kind]).format('x')}", "return self.out(x)"]
        return self._add(f"Tower{len(self._classes)}", parts, "x", body)

    def _sequential(self, kind: str, pairs: list[tuple[int, int]], last: str, normed: bool) -> str:
        """Adds a class around an nn.Sequential, called as a whole or part by part; its name."""
        parts = []
        for a, b in pairs:
            parts += [f"nn.Linear({a}, {b})", *([f"nn.LayerNorm({b})"] if normed else []), ACTIVATION_MODULES[kind]]
            parts += ["nn.Dropout(0.0)"] if self._flip() else []
            parts += ["nn.Identity()"] if self._flip() else []
        whole = ["return self.mlp(x)"]
        body = ["for part in self.mlp:", "    x = part(x)", "return x"] if self._flip() else whole
        made = [f"self.mlp = nn.Sequential({', '.join([*parts, last])})"]
        return self._add(f"Tower{len(self._classes)}", made, "x", body)

    def _block(self, kind: str, normed: bool) -> str:
        """Adds a class with one linear, its norm and its activation; its name."""
        body = [f"h = {self._one(LINEARS).format('fc', 'x')}"]
        body += self._norm("norm", "h", "h.shape[-1]") if normed else []
        body += [f"return {self._one(ACTIVATIONS[kind]).format('h')}"]
        parts = ["self.fc = nn.Linear(a, b)", *(["self.norm = nn.LayerNorm(b)"] if normed else [])]
        name = f"Block{len(self._classes)}"
        acts = f"self.act, self.own = {ACTIVATION_MODULES[kind]}, lambda t: F.relu(t)"
        return self._add(name, [*parts, acts], "x", body, made_of="a, b")

    def _stack(self) -> tuple[list[str], list[str]]:
        """The attributes with the layers of a Wukong, and the statements that run them."""
        form = self._one(STACKS)
        if form == "named":
            names = [f"self.layer{place}" for place in range(LAYERS)]
            return [f"{name} = Layer()" for name in names], [f"x = {name}(x)" for name in names]
        layers = f"[Layer() for _ in range({LAYERS})]"
        if form == "sequential":
            return [f"self.layers = nn.Sequential(*{layers})"], ["x = self.layers(x)"]
        return [f"self.layers = nn.ModuleList({layers})"], ["for layer in self.layers:", "    x = layer(x)"]

    def _add(self, name: str, parts: list[str], takes: str, body: list[str], made_of: str = "") -> str:
        """Adds a class with these attributes and this forward; its name."""
        made = [f"class {name}(nn.Module):", f"    def __init__({', '.join(filter(None, ('self', made_of)))}):"]
        made += [f"        {line}" for line in ("super().__init__()", *parts)]
        made += ["", f"    def forward(self, {takes}):", *(f"        {line}" for line in body)]
        self._classes.append("\n".join(made))
        return name

    def _text(self, inputs: str) -> str:
        return "\n\n\n".join([HEAD, *self._classes, f"def inputs(batch):\n    return {inputs}\n"])

    def _one(self, choices: Sequence[Choice]) -> Choice:
        return choices[0] if self._random is None else self._random.choice(choices)

    def _flip(self) -> bool:
        return self._random is not None and self._random.random() < 0.5


MODELS: dict[str, Callable[[Speller], str]] = {"wukong": Speller.wukong, "dcnv2": Speller.dcnv2}
