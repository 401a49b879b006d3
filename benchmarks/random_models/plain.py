"""Constructs of every recommender: layers, products, layouts, embeddings, modules of torch."""

from __future__ import annotations

from benchmarks.random_models.construct import Lines

LAYERS = {
    "linear": Lines("$y = $a($x)"),
    "block": Lines("$y = $f"),
    "two linears": Lines("$y = $b($a($x))"),
    "sequential": Lines("$y = self.s$k($x)",
                        "self.s$k = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))"),
    "norm after linear": Lines("$y = $n($a($x))"),
    "scaled residual": Lines("$y = $x + $c * $a($n($x))"),
    "hand-written RMSNorm": Lines("$y = $a($x * torch.rsqrt($x.pow(2).mean(-1, keepdim=True) + 1e-6) * $v)"),
    "hand-written LayerNorm": Lines("""
        c$k = $x - $x.mean(-1, keepdim=True)
        $y = $a(c$k / (c$k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * $v + $c)"""),
    "functional norm": Lines("$y = $a(F.layer_norm($x, (16,), $v, None, 1e-5))"),
    "gate": Lines("$y = $x * torch.sigmoid($a($x))"),
    "SwiGLU": Lines("""
        p$k, q$k = self.g$k($n($x)).chunk(2, dim=-1)
        $y = $a(F.silu(p$k) * q$k)""", "self.g$k = nn.Linear(16, 32)"),
    "cross layer": Lines("$y = $x * $a($x) + $x"),
    "dropout": Lines("$y = $b($drop($act($a($x))))"),
    "experts": Lines("""
        g$k = torch.softmax(self.g$k($x), dim=-1)
        $y = (torch.stack([e($x) for e in self.e$k], dim=1) * g$k.unsqueeze(-1)).sum(1)""",
                     "self.g$k = nn.Linear(16, 3)\nself.e$k = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))"),
}  # fmt: skip

PRODUCTS = {
    "matmul and bias": Lines("$y = $x @ $w + $v"),
    "matmul transposed": Lines("$y = torch.matmul($x, $w.t())"),
    "functional linear": Lines("$y = F.linear($act($x), $w, $v)"),
    "addmm": Lines("$y = torch.addmm($v, $x, $w)"),
    "einsum of heads": Lines('$y = torch.einsum("bhi,hij->bhj", $x.view(-1, 4, 4), self.h$k).reshape(-1, 16)',
                             "self.h$k = nn.Parameter(torch.randn(4, 4, 4) / 2)"),
    "bmm": Lines("$y = torch.bmm($x.view(-1, 4, 4).transpose(0, 1), self.h$k).transpose(0, 1).reshape(-1, 16)",
                 "self.h$k = nn.Parameter(torch.randn(4, 4, 4) / 2)"),
    "3-D matmul": Lines("$y = ($x.reshape(-1, 4, 4) @ self.h$k).flatten(1)",
                        "self.h$k = nn.Parameter(torch.randn(4, 4) / 2)"),
    "weight on the left": Lines("$y = ($w @ $x.t()).t()"),
    "interaction": Lines("""
        e$k = $a($x).view(-1, 4, 4)
        $y = $b(torch.matmul(e$k, e$k.transpose(1, 2)).flatten(1))"""),
    "mixing layer": Lines("""
        m$k = $a($x).view(-1, 4, 4)
        $y = $b((m$k @ (m$k.transpose(1, 2) @ self.r$k)).flatten(1))""",
                          "self.r$k = nn.Parameter(torch.randn(4, 4) / 2)"),
    "mixing layer of a module": Lines("$y = self.m$k($a($x).view(-1, 4, 4)).flatten(1)",
                                      "self.m$k = Mixing$k()", top="""
        class Mixing$k(nn.Module):
            def __init__(self):
                super().__init__()
                self.r = nn.Parameter(torch.randn(4, 4) / 2)

            def forward(self, x):
                return torch.bmm(x, torch.matmul(x.transpose(1, 2), self.r))"""),
    "joined norm": Lines("""
        m$k = torch.cat([$x.view(-1, 4, 4), $a($x).view(-1, 4, 4)], dim=1)
        $y = self.j$k(m$k).flatten(1)[:, :16]""",
                         "self.j$k = nn.LayerNorm(4)"),
    "product of weights": Lines("$y = $x @ ($w @ self.z$k)", "self.z$k = nn.Parameter(torch.randn(16, 16) / 4)"),
    "weights together": Lines("""
        p$k, q$k = ($x @ torch.cat([$w, self.z$k], dim=1)).chunk(2, dim=1)
        $y = p$k * $act(q$k)""",
                              "self.z$k = nn.Parameter(torch.randn(16, 16) / 4)"),
}  # fmt: skip

LAYOUTS = {
    "transpose": Lines("$y = $a($x.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16))"),
    "heads": Lines("$y = self.h$k($x.view(-1, 4, 4)).view(-1, 16)", "self.h$k = nn.Linear(4, 4)"),
    "chunk": Lines("p$k, q$k = $a($x).chunk(2, dim=1)\n$y = $b(torch.cat((q$k, p$k), dim=1))"),
    "split": Lines("p$k, q$k, r$k = $a($x).split([4, 4, 8], dim=-1)\n$y = torch.cat([r$k, p$k * q$k, p$k], dim=-1)"),
    "unbind": Lines("$y = $a(torch.stack($x.view(-1, 4, 4).unbind(1)[::-1], dim=1).flatten(1))"),
    "last of a sequence": Lines("$y = $b($a(torch.stack([$x, $x * $c], dim=1))[:, -1])"),
    "index by a list": Lines("$y = $a($x[:, [3, 1, 2, 0] * 4])"),
    "token mixing": Lines("$y = self.t$k($x.view(-1, 4, 4).transpose(1, 2)).transpose(1, 2).reshape($x.shape)",
                          "self.t$k = nn.Linear(4, 4)"),
}  # fmt: skip

EMBEDDINGS = {
    "embedding": Lines("$y = $x + $a(self.e$k($ids).flatten(1))", "self.e$k = nn.Embedding(20, 4)"),
    "embedding bag": Lines("$y = $a(torch.cat([$x[:, :8], self.e$k($ids)], 1))", "self.e$k = nn.EmbeddingBag(20, 8)"),
    "padding": Lines("""
        m$k = ($ids != 0).unsqueeze(-1).to($x.dtype)
        $y = $x + $a((self.e$k($ids) * m$k).sum(1) / m$k.sum(1).clamp(min=1))""",
                     "self.e$k = nn.Embedding(20, 16, padding_idx=0)"),
    "tables": Lines("$y = $x + $a(torch.cat([e(i) for e, i in zip(self.e$k, $ids.unbind(1))], dim=-1))",
                    "self.e$k = nn.ModuleList(nn.Embedding(20, 4) for _ in range(4))"),
}  # fmt: skip

TORCH = {
    "BatchNorm": Lines("$y = $a($bn($x))"),
    "BatchNorm of a linear": Lines("$y = $x + $b($drop(F.relu($bn($a($x)))))"),
    "BatchNorm of two": Lines("$y = $b(F.silu(self.o$k($a($x))))\n$y = $x + self.q$k(torch.tanh($bn($y)))",
                              "self.o$k = nn.BatchNorm1d(16, eps=1e-3, affine=False)\nself.q$k = nn.Linear(16, 16)"),
    "dropout of an activation": Lines("$y = $b($drop(F.gelu($a($x))))"),
    "GRU": Lines("$y = $x + $a(self.r$k($x.view(-1, 4, 4))[0][:, -1])",
                 "self.r$k = nn.GRU(4, 16, batch_first=True)"),
    "self-attention": Lines("t$k = self.t$k($x).view(-1, 4, 8)\n$y = $a(self.m$k(t$k, t$k, t$k)[0].flatten(1)[:, :16])",
                            "self.t$k = nn.Linear(16, 32)\nself.m$k = nn.MultiheadAttention(8, 2, batch_first=True)"),
    "attention with one query": Lines("""
        t$k = self.t$k($x).view(-1, 4, 16)
        $y = $a(self.m$k(t$k[:, :1], t$k, t$k, need_weights=False)[0].squeeze(1))""",
        "self.t$k = nn.Linear(16, 64)\nself.m$k = nn.MultiheadAttention(16, 2, batch_first=True)"),
    "encoder layer": Lines("$y = $a(self.t$k($x.view(-1, 2, 8)).flatten(1))",
                           "self.t$k = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)"),
    "encoder layer with a mask": Lines("""
        t$k = self.t$k($x.unsqueeze(1) + self.e$k($ids), src_key_padding_mask=F.pad($ids[:, 1:] == 0, (1, 0)))
        $y = $a(t$k[:, 0])""",
        "self.e$k = nn.Embedding(20, 16)\n"
        "self.t$k = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)"),
    "hand-written attention": Lines("""
        q$k, k$k, v$k = (p($x.view(-1, 4, 4)) for p in self.p$k)
        $y = $a((torch.softmax(q$k @ k$k.transpose(-2, -1) / 2, dim=-1) @ v$k).flatten(1))""",
        "self.p$k = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))"),
    "conv1d": Lines("$y = $a(self.c$k($x.unsqueeze(1)).squeeze(1))", "self.c$k = nn.Conv1d(1, 1, 3, padding=1)"),
    "spectral norm": Lines("$y = $b($act(self.l$k($x)))",
                           "self.l$k = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))"),
}  # fmt: skip

PLAIN = {"layers": LAYERS, "products": PRODUCTS, "layouts": LAYOUTS, "embeddings": EMBEDDINGS, "torch": TORCH}
