"""Constructs of Python: values and where they are kept, control flow, objects that change, in-place, hooks, sharing."""

from __future__ import annotations

from benchmarks.random_models.construct import Lines

VALUES = {
    "attribute": Lines("$y = $f * self.temp$k", "self.temp$k = $c", change="self.temp$k *= 0.9"),
    "dict": Lines('$y = $f * self.cfg$k["scale"]', 'self.cfg$k = {"scale": $c}', change='self.cfg$k["scale"] = 3.0'),
    "list": Lines("$y = $f\nfor s in self.scales$k:\n    $y = $y * s", "self.scales$k = [$c, 2.0]",
                  change="self.scales$k.append(0.3)"),
    "namespace": Lines("$y = $f * self.cfg$k.t", "self.cfg$k = types.SimpleNamespace(t=$c)",
                       change="self.cfg$k.t = 3.0"),
    "global": Lines("$y = $f * SCALE$k", top="SCALE$k = $c", change="globals()['SCALE$k'] = 3.0"),
    "global namespace": Lines("$y = $b($act($a($x) * CFG$k.t))", top="CFG$k = types.SimpleNamespace(t=$c)",
                              change="CFG$k.t = 3.0"),
    "global tensor": Lines("$y = $f * WEIGHTS$k.sum()", top="WEIGHTS$k = torch.tensor([$c, 2.0])",
                           change="WEIGHTS$k[0] = 3.0"),
    "class attribute": Lines("$y = $f * Scale$k.value", top="class Scale$k:\n    value = $c",
                             change="Scale$k.value = 3.0"),
    "default argument": Lines("$y = self.act$k($f)",
                              methods="def act$k(self, x, act=$act, scale=$c):\n    return act(x) * scale",
                              change="type(self).act$k.__defaults__ = (torch.cos, 3.0)"),
    "closure": Lines("$y = scaled$k($f)",
                     top="def make$k(act, t):\n    return lambda x: act(x) * t\nscaled$k = make$k($act, $c)",
                     change="globals()['scaled$k'] = make$k(torch.cos, 3.0)"),
    "closure over a cell": Lines("$y = $f * self.get$k()",
                                 "t$k = [$c]\nself.get$k, self.cell$k = (lambda: t$k[0]), t$k",
                                 change="self.cell$k[0] = 3.0"),
    "partial": Lines("$y = $b(self.act$k($a($x)))", "self.act$k = functools.partial(F.leaky_relu, negative_slope=$c)",
                     change="self.act$k = functools.partial(F.leaky_relu, negative_slope=0.9)"),
    "function attribute": Lines("$y = $b(self.act$k($a($n($x))))", "self.act$k = $act",
                                change="self.act$k = torch.cos"),
    "numpy scalar": Lines("$y = $f / np.sqrt(self.width$k)", "self.width$k = np.float64(16)"),
    "tensor attribute": Lines("$y = $f / self.t$k", "self.t$k = torch.tensor([$c])",
                              change="self.t$k = torch.tensor([3.0])"),
    "buffer": Lines("$y = $f * self.t$k",
                    'self.register_buffer("t$k", torch.tensor($c))', change="self.t$k.fill_(3.0)"),
    "item of a buffer": Lines("$y = $f * self.t$k.item()", 'self.register_buffer("t$k", torch.tensor($c))',
                              change="self.t$k.fill_(3.0)"),
    "eps": Lines("$y = $b($act($n($a($x))))", change="$n.eps = 0.5"),
    "p of dropout": Lines("$y = $b($drop($a($x)))", change="$drop.p = 0.6"),
    "property": Lines("$y = $f * self.scale$k", "self.raw$k = $c",
                      "@property\ndef scale$k(self):\n    return self.raw$k * 2",
                      change="self.raw$k = 3.0"),
    "schedule": Lines("$y = $f if self.epoch$k < 2 else $x", "self.epoch$k = 0", change="self.epoch$k += 2"),
}  # fmt: skip

PYTHON = {
    "__getattr__": Lines("$y = $f * self.magic", "self.__dict__['hidden'] = {'magic': $c}", """
        def __getattr__(self, name):
            return self.__dict__["hidden"][name] if name == "magic" else super().__getattr__(name)"""),
    "super().forward": Lines("$y = self.l$k($x)", "self.l$k = Scaled$k(16, 16)", top="""
        class Scaled$k(nn.Linear):
            def forward(self, x):
                return super().forward(x) * $c"""),
    "decorator": Lines("$y = self.half$k($x)", methods="@doubled$k\ndef half$k(self, x):\n    return $a(x)", top="""
        def doubled$k(function):
            @functools.wraps(function)
            def run(*args, **kwargs):
                return function(*args, **kwargs) * 2
            return run"""),
    "lambda": Lines("act$k = lambda t: $act(t) * $c\n$y = $b(act$k($a($x)))"),
    "loop": Lines("$y = $x\nfor i, l in enumerate(self.l$k):\n    $y = $y + $act(l($y)) / (i + 1)",
                  "self.l$k = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))"),
    "zip": Lines("$y = sum(l(p) for l, p in zip(self.l$k, ($x, $x * 2, $act($x))))",
                 "self.l$k = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))"),
    "dict of modules": Lines("""
        o$k = {name: l($x) for name, l in self.d$k.items()}
        $y = o$k["p"] * torch.sigmoid(o$k["q"])""", "self.d$k = nn.ModuleDict({n: nn.Linear(16, 16) for n in 'pq'})"),
    "dispatch by name": Lines("$y = self.d$k[self.which$k]($x)",
                              "self.d$k = nn.ModuleDict({n: nn.Linear(16, 16) for n in 'pq'})\nself.which$k = 'p'",
                              change="self.which$k = 'q'"),
    "list of Parameters": Lines("$y = $x\nfor w in self.p$k:\n    $y = $y * $act($y @ w) + $x",
                                "self.p$k = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(2))"),
    "while": Lines("i$k, $y = 0, $x\nwhile i$k < 2:\n    $y = $act($a($y))\n    i$k += 1"),
    "try": Lines("try:\n    $y = $a($x) @ self.absent$k\nexcept AttributeError:\n    $y = $f"),
    "f-string": Lines('$y = getattr(self, f"a#{$k + 1}")($x)', 'self.add_module(f"a#{$k + 1}", nn.Linear(16, 16))'),
    "walrus": Lines("$y = $b(h$k) * torch.sigmoid(h$k) if (h$k := $a($x)) is not None else $x"),
    "args and kwargs": Lines("$y = self.mix$k($x, $a($x), scale=$c)", methods="""
        def mix$k(self, *parts, **options):
            return sum(parts) * options.get("scale", 1.0)"""),
    "direct forward": Lines("$y = $b.forward($act($a.forward($n($x))))"),
    "map": Lines("$y = torch.stack(list(map($a, ($x, $x * $c)))).sum(0)"),
    "generator": Lines("$y = sum(self.parts$k($x))",
                       methods="def parts$k(self, x):\n    yield $a(x)\n    yield $b($act(x))"),
    "recursion": Lines("$y = self.again$k($x, 3)", methods="""
        def again$k(self, x, n):
            return x if n == 0 else self.again$k($act($a(x)), n - 1)"""),
    "match": Lines("match self.kind$k:\n    case 'sum':\n        $y = $x + $f\n    case _:\n        $y = $x * $f",
                   "self.kind$k = 'sum'",
                   change="self.kind$k = 'product'"),
    "optional module": Lines("$y = $x if self.l$k is None else self.l$k($x)", "self.l$k = None",
                             change="self.l$k = nn.Linear(16, 16, bias=False)\n"
                             "nn.init.constant_(self.l$k.weight, 0.1)"),
    "context manager": Lines("with scoped$k() as c$k:\n    $y = $f * c$k",
                             top="@contextlib.contextmanager\ndef scoped$k():\n    yield $c"),
    "module made in forward": Lines("$y = nn.Softmax(dim=-1)($x @ $w) * $f"),
    "tensor made in forward": Lines("$y = $f * torch.tensor([$c, 2.0]).repeat(8)"),
}  # fmt: skip

OBJECTS = {
    "random.Random": Lines("$y = $x if self.rng$k.random() < 0.03 else $x + $f", "self.rng$k = random.Random($k)"),
    "random module": Lines("$y = $x + $f * random.random()"),
    "numpy generator": Lines("$y = $f * float(self.rng$k.uniform(0.5, 1))", "self.rng$k = np.random.default_rng($k)"),
    "torch.rand": Lines("$y = $f + torch.rand(1) * 0.5"),
    "own torch generator": Lines("$y = $f * torch.rand(1, generator=self.rng$k)",
                                 "object.__setattr__(self, 'rng$k', torch.Generator().manual_seed($k))"),
    "noise in training": Lines("$y = $f\nif self.training:\n    $y = $y + torch.randn_like($y) * 0.1"),
    "iterator": Lines("$y = $f * next(self.it$k)", "self.it$k = itertools.cycle([1.0, 2.0, $c])"),
    "deque": Lines("self.last$k.append($x.shape[0])\n$y = $f * (sum(self.last$k) / 100)",
                   "self.last$k = collections.deque([1], maxlen=3)"),
    "every tenth call": Lines("self.calls$k += 1\n$y = $x if self.calls$k % 10 == 0 else $f", "self.calls$k = 0"),
    "global counter": Lines("CALLS$k[0] += 1\n$y = $f / CALLS$k[0]", top="CALLS$k = [0]"),
    "log of calls": Lines("$y = $f\nself.log$k.append(tuple($y.shape))", "self.log$k = []"),
    "last output is used": Lines("$y = $f + self.last$k\nself.last$k = $y.detach().mean(0)", "self.last$k = 0.0"),
    "cache by shape": Lines("""
        if $x.shape not in self.cache$k:
            self.cache$k[$x.shape] = torch.ones($x.shape[0], 1) * (len(self.cache$k) + 1)
        $y = $f * self.cache$k[$x.shape]""", "self.cache$k = {}"),
    "made on the first call": Lines("""
        if self.mask$k is None:
            self.mask$k = torch.linspace(0, 1, 16)
        $y = $f * self.mask$k""",
                                    "self.mask$k = None"),
    "lru_cache": Lines("$y = $f * table$k($x.shape[0])",
                       top="@functools.lru_cache\ndef table$k(n):\n    return 1 + n / 100"),
}  # fmt: skip

IN_PLACE = {
    "fresh +=": Lines("$y = $a($x)\n$y += $x"),
    "fresh mul_": Lines("$y = $b($act($a($x).mul_($c)))"),
    "reshape +=": Lines("r$k = $x.reshape(-1, 16)\nr$k += 1\n$y = $a(r$k) + $x"),
    "contiguous +=": Lines("r$k = $x.contiguous()\nr$k *= $c\n$y = $b($act($a(r$k))) + $x"),
    "float mul_": Lines("h$k = $a($x)\nh$k.float().mul_($c)\n$y = $b($act(h$k))"),
    "view": Lines("h$k = $a($x)\nh$k[:, :8] *= $c\n$y = $b($act(h$k))"),
    "masked_fill_": Lines("h$k = $a($x)\n$y = $b(h$k.masked_fill_(torch.arange(16) % 3 == 0, 0.0))"),
    "index put": Lines("$y = $a($x).clone()\n$y[:, [1, 3]] = $x[:, [3, 1]]"),
    "detached": Lines("h$k = $a($x)\nh$k.detach().mul_($c)\n$y = $b(h$k)"),
    "data": Lines("h$k = $a($x)\nh$k.data.add_(1)\n$y = $b($act(h$k))"),
    "ReLU in place": Lines("h$k = $a($x)\n$y = $b(F.relu(h$k, inplace=True)) + h$k"),
    "input in place": Lines("$x += 1\n$y = $f"),
    "counting buffer": Lines("self.seen$k += $x.shape[0]\n$y = $f / self.seen$k.float().sqrt()",
                             'self.register_buffer("seen$k", torch.zeros((), dtype=torch.long))'),
    "moving mean": Lines("""
        $y = $a($x)
        if self.training:
            with torch.no_grad():
                self.mean$k.mul_(0.9).add_($y.float().mean(0), alpha=0.1)
        $y = $b($y - self.mean$k)""", 'self.register_buffer("mean$k", torch.zeros(16))'),
    "weight in forward": Lines("""
        if self.training:
            with torch.no_grad():
                $w.clamp_(-0.3, 0.3)
        $y = $x @ $w"""),
}  # fmt: skip

HOOKS = {
    "hook that looks": Lines("$y = $b($act($a($x)))",
                             "self.seen$k = []\n$a.register_forward_hook(lambda m, i, o: self.seen$k.append(o.shape))"),
    "hook that changes": Lines("$y = $b($act($a($n($x))))", "$a.register_forward_hook(lambda m, i, o: o * 2)"),
    "pre-hook of a norm": Lines("$y = $b($act($a($n($x))))",
                                "$n.register_forward_pre_hook(lambda m, i: (i[0] * $c + 1,))"),
    "backward hook": Lines("$y = $b($act($a($x)))",
                           "$a.register_full_backward_hook(lambda m, i, o: (i[0] if i[0] is None else i[0] * 0.5,))"),
    "gradient hook": Lines("$y = $b($act($a($x)))", "$a.weight.register_hook(lambda g: g * 0.5)"),
    "hook added later": Lines("$y = $b($act($a($n($x))))", change="$a.register_forward_hook(lambda m, i, o: o * 2)"),
    "pre-hook added later": Lines("$y = $b($act($a($n($x))))",
                                  change="$n.register_forward_pre_hook(lambda m, i: (i[0] + 1,))"),
    "backward hook added later": Lines("$y = $b($act($a($x)))",
                                       change="$b.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))"),
}  # fmt: skip

SHARING = {
    "module twice": Lines("$y = $a($act($a($x)))"),
    "tied weights": Lines("$y = $b($act($a($x)))", "$b.weight = $a.weight"),
    "tied transposed": Lines("$y = F.linear($act($a($x)), $a.weight.t())"),
    "module under two names": Lines("$y = self.same$k($act($a($x)))", "self.same$k = $a"),
    "weight of a child and its call": Lines("$y = $a($x) + ($x @ $a.weight) * $c"),
    "frozen later": Lines("$y = $b($act($a($x)))", change="$a.requires_grad_(False)"),
    "weights changed": Lines("$y = $f", change="$a.weight.data.mul_(-2)"),
    "Parameter replaced": Lines("$y = $f", change="$a.weight = nn.Parameter(torch.full((16, 16), 0.1).tril())"),
    "module replaced": Lines("$y = $b($act($a($n($x))))", change="$a = nn.Sequential($a, nn.Tanh())"),
    "forward replaced": Lines("$y = $f", change="$b.forward = lambda x: x * 2"),
    "module outside of the tree": Lines("$y = self.out$k[0]($x)", "self.out$k = [nn.Linear(16, 16)]"),
    "bfloat16 child": Lines("$y = $b($act($a($x.bfloat16()).to($x.dtype)))", "$a.bfloat16()"),
}  # fmt: skip

OF_PYTHON = {
    "values": VALUES,
    "python": PYTHON,
    "objects": OBJECTS,
    "in place": IN_PLACE,
    "hooks": HOOKS,
    "sharing": SHARING,
}
