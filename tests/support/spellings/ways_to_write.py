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
MATRICES = (  # x, {1}, by a matrix {0} of (outputs, inputs)
    "F.linear({1}, {0})",
    "{1} @ {0}.t()",
    "torch.mm({1}, {0}.T)",
    "torch.einsum('bi,oi->bo', {1}, {0})",
    "({0} @ {1}.t()).t()",
    "torch.mm({0}, {1}.T).transpose(0, 1)",
    "torch.tensordot({1}, {0}, dims=([1], [1]))",
    "F.linear({1}, {0}.to({1}.dtype))",
    "{1} @ {0}.type_as({1}).t()",
)
BIASED = (  # the same with a bias {2}
    "F.linear({1}, {0}, {2})",
    "F.linear(input={1}, weight={0}, bias={2})",
    "torch.addmm({2}, {1}, {0}.t())",
    "{1} @ {0}.T + {2}",
    "torch.matmul({1}, {0}.transpose(0, 1)) + {2}",
    "torch.einsum('bi,oi->bo', {1}, {0}) + {2}",
    "({0} @ {1}.t()).t() + {2}",
    "torch.tensordot({1}, {0}, dims=([1], [1])) + {2}",
    "F.linear({1}, {0}.to({1}.dtype), {2}.to({1}.dtype))",
    "{1} @ {0}.to({1}.dtype).t() + {2}.to({1}.dtype)",
)
LINEARS = ("self.{0}({1})", *(way.format("self.{0}.weight", "{1}", "self.{0}.bias") for way in BIASED))  # of a local
PLAIN_LINEARS = ("self.{0}({1})", *(way.format("self.{0}.weight", "{1}") for way in MATRICES))  # without a bias
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
        "{0}.relu_()",
        "torch.where({0} > 0, {0}, torch.zeros_like({0}))",
        "{0}.clamp(min=0)",
        "torch.clamp_min({0}, 0.0)",
        "torch.maximum({0}, torch.zeros_like({0}))",
        "torch.max({0}.new_zeros(()), {0})",
        "{0} * ({0} > 0)",
        "(lambda t: t.relu())({0})",
        "self.own({0})",
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
    "torch.einsum('bd,bd->bd', {0}, {1}) + {2}",
    "{0}.mul({1}).add_({2})",
)
TRANSPOSES = (
    "{0}.transpose(1, 2)",
    "{0}.permute(0, 2, 1)",
    "{0}.mT",
    "torch.transpose({0}, -1, -2)",
    "{0}.swapaxes(1, 2)",
)
BATCHES = ("{0}.shape[0]", "{0}.size(0)", "len({0})")
MIXED = (  # x^T @ rank of x, {0}, which transposed is {1}; {2} is the rank, {3} the batch
    "{1} @ {2}",
    "torch.matmul({1}, {2})",
    "{1}.matmul({2})",
    "torch.einsum('bnd,nr->bdr', {0}, {2})",
    "torch.bmm({1}, {2}.unsqueeze(0).expand({3}, -1, -1))",
    "torch.matmul({1}, {2}[None])",
    "{1} @ {2}.to({0}.dtype)",
    "torch.tensordot({0}, {2}, dims=([1], [0]))",
)
PAIRS = (  # x @ that
    "{0} @ {1}",
    "torch.matmul({0}, {1})",
    "{0}.matmul({1})",
    "torch.bmm({0}, {1})",
    "torch.einsum('bnd,bdr->bnr', {0}, {1})",
)
WEIGHTED = (  # compress, {0}, @ x, {1}; {2} is the batch
    "{0} @ {1}",
    "torch.matmul({0}, {1})",
    "torch.einsum('cn,bnd->bcd', {0}, {1})",
    "torch.bmm({0}.unsqueeze(0).expand({2}, -1, -1), {1})",
    "{0}.to({1}.dtype) @ {1}",
    "F.linear({1}.transpose(1, 2), {0}).transpose(1, 2)",
)
HELD = (  # rank and compress: how they are made, of {0} outputs and {1} inputs, and multiply x, {2}, from the left
    None,  # Parameters, as MIXED and WEIGHTED have it
    ("nn.Conv1d({1}, {0}, kernel_size=1, bias=False)", "self.{0}({1})"),
    ("nn.Parameter(torch.randn({0}, {1}, 1) * {1}**-0.5)", "F.conv1d({1}, self.{0})"),
    (
        "nn.Parameter(torch.randn(1, {0}, {1}) * {1}**-0.5)",
        "torch.bmm(self.{0}.expand({1}.shape[0], -1, -1), {1})",
    ),
)
CALLS = ("{0}({1}, {2})", "{0}(x0={1}, x={2})", "{0}({1}, x={2})")
TOWERS = ("sequential", "loop", "named", "blocks", "range")  # where the modules of an MLP begin and end
STACKS = ("list", "sequential", "named")
MIXING = ("layer", "sums", "pairs", "both", "machine")  # which parts of a mixing layer are modules of their own
JOINS = ("inside", "outside")  # where the norm of a join is: in its layer, or in a module around it
CROSS_NETS = (
    "layers",
    "net",
    "stacked",
    "lists",
    "columns",
    "samples",
    "fields",
)  # what holds the matrices and biases of cross layers
MULTIPLIED = ("{0} * {1}", "self.times({0}, {1})")  # by an operator, or by a module of its own
COLUMNS = {  # rows as columns, and these as rows
    "columns": (
        ("{0}.unsqueeze(2)", "{0}[..., None]", "{0}.reshape(-1, {1}, 1)"),
        ("{0}.squeeze(2)", "{0}.squeeze(-1)"),
    ),
    "samples": (("{0}.t()", "{0}.T"), ("{0}.t()", "{0}.T")),
}
FIELDS = (  # rows as blocks of fields, {1} of {2}, and these as rows
    ("{0}.view(-1, {1}, {2})", "{0}.unflatten(1, ({1}, {2}))"),
    ("{0}.flatten(1)", "{0}.reshape(-1, {1} * {2})"),
)
IN_FIELDS = (  # of blocks by a Parameter {0} of three dimensions, whose order is the second: to the rank, and back
    ("torch.einsum('bfd,fdr->br', {1}, {0})", "torch.einsum('br,fdr->bfd', {1}, {0})", "fdr"),
    ("torch.einsum('rfd,bfd->br', {0}, {1})", "torch.einsum('rfd,br->bfd', {0}, {1})", "rfd"),
    ("torch.einsum('bij,jik->bk', {1}, {0})", "torch.einsum('bk,jik->bij', {1}, {0})", "dfr"),
)
OF_COLUMNS = ("{0} @ {1}", "torch.matmul({0}, {1})", "{0}.matmul({1})")  # by a matrix {0}
CROSS_ENDS = ("inside", "outside")  # where x is added
