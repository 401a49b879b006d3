"""Models that write their GEMMs in unusual ways, in the manner of public recommenders, each with its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def drawn(*shape: int) -> nn.Parameter:
    """A Parameter of small normal numbers."""
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class ExpertCross(nn.Module):
    """Cross layers of low rank with experts: every weight is a matrix in a Parameter, inputs are columns (B, n, 1)."""

    def __init__(self, width: int = 48, rank: int = 32, layers: int = 2, experts: int = 2) -> None:
        super().__init__()
        self.layers, self.experts = layers, experts
        self.up = drawn(layers, experts, width, rank)
        self.down = nn.ParameterList([drawn(experts, width, rank) for _ in range(layers)])
        self.core = drawn(layers, experts, rank, rank)
        self.bias = nn.Parameter(torch.zeros(layers, width, 1))
        self.gates = nn.ModuleList([nn.Linear(width, 1, bias=False) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        start = column = x.unsqueeze(2)
        for layer in range(self.layers):
            made, scores = [], []
            for expert in range(self.experts):
                scores.append(self.gates[expert](column.squeeze(2)))
                low = torch.tanh(torch.matmul(self.down[layer][expert].t(), column))
                low = torch.tanh(self.core[layer, expert] @ low)
                wide = torch.matmul(self.up[layer][expert], low) + self.bias[layer]
                made.append((start * wide).squeeze(2))
            mixed = torch.matmul(torch.stack(made, 2), torch.stack(scores, 1).softmax(1))
            column = column + mixed
        return column.squeeze(2)


class MatrixCross(nn.Module):
    """DCN with one Parameter (layers, n, n) for all kernels, in a network with an input and an output linear."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.lift = nn.Linear(24, width)
        self.kernels = drawn(layers, width, width)
        self.biases = nn.Parameter(torch.zeros(layers, width, 1))
        self.out = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        start = column = self.lift(x).unsqueeze(-1)
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            column = start * (torch.matmul(kernel, column) + bias) + column
        return self.out(column.squeeze(-1))


class RowsOfMatrices(nn.Module):
    """Rows times matrices that are taken from Parameters in every way, among them from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = drawn(4, 32, 32)
        self.deep = drawn(2, 2, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.deep.unbind(0)
        x = torch.tanh(x @ self.stacked[0])
        x = torch.tanh(F.linear(x, self.stacked[-1]))
        x = torch.tanh(torch.einsum("bi,io->bo", x, self.stacked.select(0, 1)))
        x = torch.tanh(torch.tensordot(x, self.stacked[2], dims=([-1], [0])))
        x = torch.tanh(x @ first[1].t())
        return x @ second.select(0, 0)


class TokenMixer(nn.Module):
    """A feed-forward network of its own for each token, as batched weights: by einsum, and by a batched matmul."""

    def __init__(self, tokens: int = 4, width: int = 16, wide: int = 32) -> None:
        super().__init__()
        self.up = drawn(tokens, width, wide)
        self.up_bias = nn.Parameter(torch.zeros(tokens, wide))
        self.down = drawn(tokens, wide, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("bti,tio->bto", x, self.up) + self.up_bias)
        return x + torch.matmul(hidden.transpose(0, 1), self.down).transpose(0, 1)


class ColumnsOfTokens(nn.Module):
    """A matrix for each token from the left: (tokens, n, k) times columns (B, tokens, k, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = drawn(4, 24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weight, x.unsqueeze(-1)).squeeze(-1)


class CompressedInteraction(nn.Module):
    """xDeepFM's interaction: outer products of fields, compressed by convolutions of kernel size 1."""

    def __init__(self, fields: int = 6, maps: tuple[int, ...] = (8, 10)) -> None:
        super().__init__()
        sizes = (fields, *maps)
        self.convs = nn.ModuleList(
            [nn.Conv1d(fields * before, after, 1) for before, after in zip(sizes, maps, strict=False)]
        )
        self.wide = nn.Conv1d(maps[-1], 4, 3, padding=1)
        self.out = nn.Linear(sum(maps) + 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        start, hidden, found = x, x, []
        for conv in self.convs:
            outer = torch.einsum("bhd,bmd->bhmd", start, hidden)
            hidden = F.relu(conv(outer.flatten(1, 2)))
            found.append(hidden.sum(-1))
        found.append(self.wide(hidden).sum(-1))
        return self.out(torch.cat(found, 1))


class Products(nn.Module):
    """PNN's inner and outer products, and attention scores, of activations alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 16)
        summed = x.sum(1)
        outer = torch.einsum("bi,bj->bij", summed, summed) + summed.unsqueeze(2) @ summed.unsqueeze(1)
        inner = torch.einsum("bfd,bgd->bfg", x, x[:, :3])
        field = torch.einsum("bfd,bfd->bf", x, x)
        scores = torch.einsum("bfi,bij,bgj->bfg", x, outer, x)
        return self.out(summed) + inner.sum((1, 2))[:, None] + field.sum(1, True) + scores.sum((1, 2))[:, None]


class FieldAttention(nn.Module):
    """AutoInt: fields attend to each other through nn.MultiheadAttention."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(layers)])
        self.unused = nn.Linear(width, width)
        self.out = nn.Linear(5 * width, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 16)
        for attention in self.attentions:
            x = F.relu(attention(x, x, x)[0] + x)
        return self.out(x.flatten(1))


def matrices() -> nn.Module:
    """`RowsOfMatrices`, drawn the same each time."""
    torch.manual_seed(0)
    return RowsOfMatrices()


def matrices_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 32, generator=torch.Generator().manual_seed(1)),)


def crosses() -> nn.Module:
    """`ExpertCross`, drawn the same each time."""
    torch.manual_seed(0)
    return ExpertCross()


def crosses_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 48, generator=torch.Generator().manual_seed(1)),)


def kernels() -> nn.Module:
    """`MatrixCross`, drawn the same each time."""
    torch.manual_seed(0)
    return MatrixCross()


def kernels_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 24, generator=torch.Generator().manual_seed(1)),)


class Convolved(nn.Module):
    """Convolutions of size 1: of rows between transposes, over the fields, and by a Parameter; (B, 24, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Conv1d(32, 48, 1), nn.LayerNorm(48)
        self.fields = nn.Sequential(nn.Conv1d(24, 40, 1, bias=False), nn.ReLU(), nn.Conv1d(40, 24, 1))
        self.kernel = drawn(16, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.rows(x.transpose(1, 2)).transpose(1, 2)))
        y = self.fields(y) + y
        return F.conv1d(y, self.kernel).flatten(1)


def convolved() -> nn.Module:
    """`Convolved`, drawn the same each time."""
    torch.manual_seed(0)
    return Convolved()


def convolved_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 24, 32, generator=torch.Generator().manual_seed(1)),)


class Folded(nn.Module):
    """Parameters of three dimensions that are one matrix each: of fields, and of experts that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.bias = drawn(4, 16, 32), drawn(4, 16, 32), nn.Parameter(torch.randn(4, 16) / 4)
        self.experts = drawn(3, 64, 32)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, 16)
        low = torch.einsum("bfd,fdr->br", x, self.down)
        x = x * (torch.einsum("br,fdr->bfd", low, self.up) + self.bias) + x
        return torch.einsum("bd,edr->ber", torch.tanh(x.flatten(1)), self.experts).flatten(1)


def folded() -> nn.Module:
    """Its sizes."""
    torch.manual_seed(0)
    return Folded()


def folded_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 4, 16, generator=torch.Generator().manual_seed(1)),)


class Mixture(nn.Module):
    """Attention, interaction by convolutions, and two linears that nothing calls, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = FieldAttention()
        self.interact = CompressedInteraction(5)
        self.spare = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:  # (B, 5, 16)
        return self.attend(x) + self.interact(x)


def mixture_inputs(batch: int) -> tuple[Tensor, ...]:
    """Its inputs."""
    return (torch.randn(batch, 5, 16, generator=torch.Generator().manual_seed(1)),)


class Ragged(nn.Module):
    """A linear over the rows that lengths leave of a padded batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Linear(16, 32)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # (B, 20, 16), (B,)
        rows = x[torch.arange(x.shape[1])[None, :] < lengths[:, None]]
        return self.out(x.mean(1)) + self.token(rows).sum()
