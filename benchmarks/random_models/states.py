"""Constructs that depend on rows, on modes and on the process, and functions with gradients of their own."""

from __future__ import annotations

from benchmarks.random_models.construct import Lines

ROWS = {
    "micro-batches": Lines("""
        c$k = ($x.shape[0] + 127) // 128
        $y = torch.cat([$b($act($a($n($x[i * 128:(i + 1) * 128])))) for i in range(c$k)])"""),
    "split of rows": Lines("$y = torch.cat([$b($act($a(p))) for p in $x.split(100)])"),
    "remainder": Lines("$y = $f * (1 + $x.shape[0] % 3)"),
    "divided by the batch": Lines("$y = $f + $x.sum(0) / $x.shape[0]"),
    "more than five": Lines("$y = $f if $x.shape[0] > 5 else $x"),
    "more than 200": Lines("if $x.shape[0] > 200:\n    $y = $a($x) * $c\nelse:\n    $y = $a($x)"),
    "at most 32": Lines("s$k = $a($x[: min($x.shape[0], 32)]).mean(0)\n$y = $f + s$k"),
    "elements": Lines("$y = $f * (2.0 if $x.numel() > 1000 else 1.0)"),
    "pairs of rows": Lines("$y = $f\nif $x.shape[0] % 2 == 0:\n    $y = $y.view(-1, 2, 16).flip(1).reshape(-1, 16)"),
    "padded rows": Lines("$y = $b($act($a(F.pad($x, (0, 0, 0, -$x.shape[0] % 4)))))[: $x.shape[0]]"),
    "halved": Lines("c$k, s$k = $x.shape[0], 1.0\nwhile c$k > 40:\n    c$k, s$k = c$k // 2, s$k * 0.8\n$y = $f * s$k"),
    "positions": Lines("$y = $f + torch.arange($x.size(0)).unsqueeze(1).to($x.dtype) / 100"),
    "zeros": Lines("$y = torch.cat([$a($x), torch.zeros($x.size(0), 4)], dim=1)[:, 4:]"),
    "products of rows": Lines("$y = $x + torch.softmax($a($x) @ $b($x).t(), dim=-1) @ $x"),
}  # fmt: skip

MODES = {
    "a child's flag": Lines("$y = $f * ($c if $drop.training else 1.0)"),
    "batch_norm by a child's flag": Lines("""
        s$k = $bn
        $y = $a(F.batch_norm($x, s$k.running_mean, s$k.running_var, s$k.weight, s$k.bias, s$k.training, 0.1, 1e-5))"""),
    "dropout by a child's flag": Lines("$y = $b(F.dropout($act($a($x)), $drop.p, $drop.training))",
                                       change="$drop.p = 0.6"),
    "own flag": Lines("$y = $f\nif not self.training:\n    $y = torch.sigmoid($y)"),
    "any child in training": Lines("$y = $f * (1.5 if any(m.training for m in self.children()) else 1.0)"),
    "grad alias": Lines("$y = $f\nif grads_on$k():\n    $y = $y * $c", top="grads_on$k = torch.is_grad_enabled"),
    "grad by name": Lines('$y = $f * ($c if getattr(torch, "is_grad_" + "enabled")() else 1.0)'),
    "asks for gradients": Lines("$y = $f * (0.5 if $x.requires_grad else 1.0)"),
    "autocast alias": Lines("$y = $f * (3.0 if mixed$k('cpu') else 1.0)", top="mixed$k = torch.is_autocast_enabled"),
    "autocast dtype": Lines("$y = $f * (3.0 if torch.get_autocast_dtype('cpu') is torch.bfloat16 else 1.0)"),
    "no_grad block": Lines("with torch.no_grad():\n    g$k = $a($x)\n$y = $f * torch.sigmoid(g$k)"),
    "autocast off": Lines('with torch.autocast("cpu", enabled=False):\n    $y = $b($act($a($x.float())))'),
    "autocast on": Lines('with torch.autocast("cpu", torch.bfloat16):\n    $y = $b($act($a($x)))\n$y = $y.float()'),
    "through double": Lines("$y = $a($x.double().square().sum(-1, keepdim=True).sqrt().float() / 4 + $x.float())"),
    "through bfloat16": Lines("$y = $b($act($a($x)).bfloat16().to($x.dtype))"),
}  # fmt: skip

_GROUP = """
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
PROCESS = {
    "process group alias": Lines("$y = $f / (2.0 if ready$k() else 1.0)", top="ready$k = dist.is_initialized",
                                 change=_GROUP, restore="dist.is_initialized() and dist.destroy_process_group()"),
    "cuda alias": Lines("$y = $f * (8.0 if gpu$k() else 1.0)", top="from torch.cuda import is_available as gpu$k"),
    "environment": Lines('$y = $f * float(os.environ.get("SCALE$k", "1"))', change='os.environ["SCALE$k"] = "3"',
                         restore='os.environ.pop("SCALE$k", None)'),
    "getenv alias": Lines('$y = $f if env$k("OFF$k") is None else $x', top="from os import getenv as env$k",
                          change='os.environ["OFF$k"] = "1"', restore='os.environ.pop("OFF$k", None)'),
    "deterministic": Lines("$y = $f * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)",
                           change="torch.use_deterministic_algorithms(True)",
                           restore="torch.use_deterministic_algorithms(False)"),
    "matmul precision": Lines('$y = $f * (1.0 if torch.get_float32_matmul_precision() == "highest" else 2.0)',
                              change='torch.set_float32_matmul_precision("high")',
                              restore='torch.set_float32_matmul_precision("highest")'),
    "logging": Lines("$y = $f\nif LOG$k.isEnabledFor(10):\n    $y = $y + 1",
                     top='LOG$k = logging.getLogger("random$k")',
                     change="LOG$k.setLevel(10)", restore="LOG$k.setLevel(0)"),
}  # fmt: skip

_FUNCTION = """
class Function$k(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {forward}
    @staticmethod
    def backward(ctx, g):
        return {backward}
"""


def _function(backward: str, forward: str = "return x.view_as(x)") -> str:
    return _FUNCTION.format(forward=forward, backward=backward)


FUNCTIONS = {
    "clipped gradient": Lines("$y = $b($act($a($n(Function$k.apply($x)))))", top=_function("g.clamp(-1e3, 1e3)")),
    "reversed gradient": Lines("$y = $a(Function$k.apply($x))", top=_function("-g")),
    "straight-through": Lines("$y = $a(Function$k.apply($x))", top=_function("g", "return (x * 4).clamp(-30, 30) / 4")),
    "saved in a function": Lines("$y = $b(Function$k.apply($a($x)))",
                                 top=_function("g * ctx.saved_tensors[0].cos()",
                                 "ctx.save_for_backward(x); return x.sin()")),
    "checkpoint": Lines("$y = save$k(self.part$k, $x, use_reentrant=False)",
                        top="from torch.utils.checkpoint import checkpoint as save$k",
                        methods="def part$k(self, x):\n    return $b($act($a($n(x))))"),
    "reentrant checkpoint": Lines("$y = torch.utils.checkpoint.checkpoint($a, $x, use_reentrant=True)",
                                  top="import torch.utils.checkpoint"),
    "checkpoint in training": Lines("""
        if self.training and torch.is_grad_enabled():
            $y = rerun$k($a, $x, use_reentrant=False)
        else:
            $y = $a($x)""", top="from torch.utils.checkpoint import checkpoint as rerun$k"),
    "hook of a tensor": Lines("$y = $f\nif $y.requires_grad:\n    $y.register_hook(lambda g: g * 0.5)"),
    "clamping hook of a tensor": Lines("""
        $y = $f
        if $y.requires_grad:
            $y.register_hook(lambda g: g.clamp(-1e3, 1e3))"""),
}  # fmt: skip

STATES = {"rows": ROWS, "modes": MODES, "process": PROCESS, "functions": FUNCTIONS}
