"""Ways in which people write the steps of a ranker, as templates; the first of each is the zoo's."""

from __future__ import annotations

CONCATENATIONS = (  # of (B, n, d) along n
    "torch.cat([{0}, {1}], 1)",
    "torch.cat([{0}, {1}], dim=1)",
    "torch.cat(({0}, {1}), dim=-2)",
    "torch.concat([{0}, {1}], dim=1)",
    "torch.concatenate(({0}, {1}), dim=1)",
    "torch.cat(tensors=[{0}, {1}], dim=1)",
    "torch.hstack([{0}, {1}])",
    "torch.cat([{0}, {1}], axis=1)",
)
SUMS = (
    "{0} + {1}",
    "{1} + {0}",
    "torch.add({0}, {1})",
    "{0}.add({1})",
    "torch.add({1}, {0}, alpha=1)",
    "torch.add(input={0}, other={1})",
    "sum([{0}, {1}])",
)
FLATTENED = (  # (B, n, d) -> (B, width); {1} is the width
    "{0}.flatten(1)",
    "{0}.flatten(start_dim=1)",
    "torch.flatten({0}, 1)",
    "{0}.reshape({0}.size(0), -1)",
    "{0}.view({0}.shape[0], -1)",
    "{0}.reshape(-1, {1})",
    "{0}.contiguous().view(-1, {1})",
)
ROWS = (  # (B, n * d) -> (B, n, d)
    "{0}.view(-1, {1}, {2})",
    "{0}.reshape(-1, {1}, {2})",
    "{0}.view({0}.size(0), {1}, {2})",
    "{0}.unflatten(1, ({1}, {2}))",
    "{0}.reshape((-1, {1}, {2}))",
    "torch.reshape({0}, (-1, {1}, {2}))",
)
LINEARS = (  # self.NAME of a local
    "self.{0}({1})",
    "F.linear({1}, self.{0}.weight, self.{0}.bias)",
    "F.linear(input={1}, weight=self.{0}.weight, bias=self.{0}.bias)",
    "torch.addmm(self.{0}.bias, {1}, self.{0}.weight.t())",
    "{1} @ self.{0}.weight.T + self.{0}.bias",
    "torch.matmul({1}, self.{0}.weight.transpose(0, 1)) + self.{0}.bias",
    "torch.einsum('bi,oi->bo', {1}, self.{0}.weight) + self.{0}.bias",
)
PLAIN_LINEARS = (  # without a bias
    "self.{0}({1})",
    "F.linear({1}, self.{0}.weight)",
    "{1} @ self.{0}.weight.t()",
    "torch.einsum('bi,oi->bo', {1}, self.{0}.weight)",
)
ACTIVATIONS = {
    "silu": (
        "self.act({0})",
        "F.silu({0})",
        "{0} * torch.sigmoid({0})",
        "{0}.sigmoid() * {0}",
        "F.silu({0}, inplace=True)",
        "torch.mul({0}, torch.sigmoid({0}))",
        "{0} * F.sigmoid({0})",
        "{0} / (1 + torch.exp(-{0}))",
    ),
    "relu": (
        "self.act({0})",
        "F.relu({0})",
        "torch.relu({0})",
        "{0}.relu()",
        "F.relu({0}, inplace=True)",
        "torch.nn.functional.relu(input={0})",
    ),
}
ACTIVATION_MODULES = {"silu": "nn.SiLU()", "relu": "nn.ReLU()"}
NORMS = (  # self.NAME of a local, an nn.LayerNorm over {2}; several statements end with the expression
    ("self.{0}({1})",),
    ("F.layer_norm({1}, ({2},), self.{0}.weight, self.{0}.bias)",),
    ("F.layer_norm({1}, self.{0}.normalized_shape, self.{0}.weight, self.{0}.bias, self.{0}.eps)",),
    ("torch.layer_norm({1}, [{2}], self.{0}.weight, self.{0}.bias, 1e-5)",),
    ("F.layer_norm({1}, {1}.shape[-1:], weight=self.{0}.weight, bias=self.{0}.bias, eps=1e-5)",),
    ("F.layer_norm({1}, ({2},)) * self.{0}.weight + self.{0}.bias",),
    (
        "mean = {1}.mean(-1, keepdim=True)",
        "var = {1}.var(-1, unbiased=False, keepdim=True)",
        "({1} - mean) / torch.sqrt(var + 1e-5) * self.{0}.weight + self.{0}.bias",
    ),
    (
        "mean = {1}.mean(dim=-1, keepdim=True)",
        "centred = {1} - mean",
        "var = centred.pow(2).mean(dim=-1, keepdim=True)",
        "centred * torch.rsqrt(var + 1e-5) * self.{0}.weight + self.{0}.bias",
    ),
    (
        "var, mean = torch.var_mean({1}, dim=-1, correction=0, keepdim=True)",
        "self.{0}.weight * (({1} - mean) / (var + 1e-5).sqrt()) + self.{0}.bias",
    ),
)
CROSSES = (  # x0 * u + x
    "{0} * {1} + {2}",
    "{2} + {0} * {1}",
    "{2} + {1} * {0}",
    "torch.addcmul({2}, {0}, {1})",
    "torch.add(torch.mul({0}, {1}), {2})",
    "torch.mul({1}, {0}).add({2})",
    "{2}.addcmul({1}, {0})",
    "sum((torch.multiply({0}, {1}), {2}))",
)
TRANSPOSES = (
    "{0}.transpose(1, 2)",
    "{0}.permute(0, 2, 1)",
    "{0}.mT",
    "torch.transpose({0}, -1, -2)",
    "{0}.swapaxes(1, 2)",
)
PRODUCTS = ("{0} @ {1}", "torch.matmul({0}, {1})", "{0}.matmul({1})")
TOWERS = ("sequential", "loop", "named", "blocks", "range")  # where the modules of an MLP begin and end
STACKS = ("list", "sequential", "named")
