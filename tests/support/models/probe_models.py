"""Models and helpers of the tests of watching."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Forms(nn.Module):
    """Every form in which a Parameter is multiplied, a module that is called twice, and a shared weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.twice = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied_again = nn.Linear(16, 16)
        self.tied_again.weight = self.tied.weight
        self.right = nn.Parameter(torch.randn(16, 8) / 4)
        self.left = nn.Parameter(torch.randn(5, 3) / 2)
        self.summed = nn.Parameter(torch.randn(3, 4) / 2)
        self.transposed = nn.Parameter(torch.randn(8, 10) / 3)
        self.bias = nn.Parameter(torch.zeros(6))
        self.added = nn.Parameter(torch.randn(10, 6) / 3)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        """x: (B, 3, 12) -> (B, 1)."""
        x = F.relu(self.first(x), inplace=True)
        x = self.twice(torch.tanh(self.twice(x)))
        x = self.tied_again(torch.tanh(self.tied(x)))
        x = x @ self.right
        x = self.left @ x + torch.einsum("bnd,nk->bkd", x, self.summed).sum(1, keepdim=True)
        x = F.linear(x, self.transposed.t())
        x = torch.addmm(self.bias, x.mean(1), self.added)
        return self.out(torch.tanh(x))


class Matrices(nn.Module):
    """Matrices of Parameters of more dimensions: from the right, on columns, by an einsum and by tensordots."""

    def __init__(self):
        super().__init__()
        self.square = nn.Parameter(torch.randn(2, 12, 12) / 4)
        self.wide = nn.ParameterList([nn.Parameter(torch.randn(2, 2, 12, 7) / 4)])
        self.dots = nn.Parameter(torch.randn(2, 7, 7) / 3)
        self.fields = nn.Parameter(torch.randn(7, 4, 3) / 3)
        self.joined = nn.Parameter(torch.randn(7, 3, 4) / 3)

    def forward(self, x):
        """x: (B, 12) -> (B, 7)."""
        x = torch.tanh(x @ self.square[0])
        x = torch.tanh(self.square[1] @ x.unsqueeze(2))
        x = torch.tanh(self.wide[0][1, 0].t() @ x).squeeze(2)
        x = torch.tanh(F.linear(x, self.wide[0][0][1]))
        x = torch.einsum("bi,io->bo", x, self.wide[0][1][1])
        x = torch.tanh(torch.tensordot(x, self.dots[0], dims=([-1], [0])))
        x = torch.tensordot(self.dots[1], x, dims=([1], [1])).t()
        x = torch.tanh(torch.einsum("bi,ifd->bdf", x, self.fields))
        return torch.einsum("odf,bdf->bo", self.joined, x)


class Checkpointed(nn.Module):
    """Two linears, the hidden part run by activation checkpointing: not at all (None), reentrant or not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(12, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        """x: (B, 12) -> (B, 1)."""
        x = self.first(x)
        if self.reentrant is None:
            return self.out(self.hidden(x))
        return self.out(checkpoint(self.hidden, x, use_reentrant=self.reentrant))


class SharedOwners(nn.Module):
    """One Parameter multiplied in two modules of one class, at the same line."""

    class Part(nn.Module):
        """x @ w."""

        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(12, 12) / 3)
        self.one = self.Part(weight)
        self.two = self.Part(weight)

    def forward(self, x):
        """x: (B, 12) -> (B, 12)."""
        return self.two(torch.tanh(self.one(x)))


def build_forms():
    torch.manual_seed(1)
    return Forms()


def forms_inputs(batch):
    return torch.randn(batch, 3, 12)


def build_matrices():
    torch.manual_seed(1)
    return Matrices()


def matrices_inputs(batch):
    return torch.randn(batch, 12)


def build_plain():
    torch.manual_seed(1)
    return Checkpointed()


def plain_inputs(batch):
    return torch.randn(batch, 12)


shared_inputs = plain_inputs


def build_shared():
    torch.manual_seed(1)
    return SharedOwners()


def train(model, batches, probe=None, context=contextlib.nullcontext, lr=0.05):
    """Plain SGD on the mean square of the output; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        with context():
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.step()
        losses.append(loss.detach())
    return losses


def make_batches(count, *shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


class Left(nn.Module):
    """P @ x of a matrix: (7, B) -> (5, B)."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(5, 7))

    def forward(self, x):
        return self.mix @ x


def build_left():
    return Left()


def left_inputs(batch):
    return torch.randn(7, batch)
