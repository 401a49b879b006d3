"""What LoKA knows of one GEMM of a model before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GemmKind(StrEnum):
    """How the model writes a GEMM."""

    LINEAR = "linear"  # a plain nn.Linear that is called
    FUNCTIONAL_LINEAR = "functional_linear"  # F.linear on a Parameter
    MATMUL = "matmul"  # @, torch.matmul, torch.mm with one Parameter
    ADDMM = "addmm"  # torch.addmm with a Parameter
    EINSUM = "einsum"
    BMM = "bmm"  # batched or generated weights: no Parameter of two dimensions takes part
    ATTENTION = "attention"  # nn.MultiheadAttention: one opaque call


@dataclass(frozen=True, slots=True)
class RowCount:
    """The M of a GEMM as a function of the batch: `per_sample * batch + fixed`."""

    per_sample: int
    fixed: int = 0

    def at(self, batch: int) -> int:
        """Number of rows at a batch size."""
        return self.per_sample * batch + self.fixed

    def __str__(self) -> str:
        terms = [f"{self.per_sample if self.per_sample != 1 else ''}B"] if self.per_sample else []
        return " + ".join(terms + ([str(self.fixed)] if self.fixed or not terms else []))


@dataclass(frozen=True, slots=True)
class Site:
    """One GEMM of the model: y = x @ weight.T with x of M x K and weight of N x K, wherever it is written.

    `name` is the fully qualified name of the module (a plain nn.Linear) or of the Parameter; where neither names it
    (generated weights, one Parameter used at several places), the owner's name and a running number.
    """

    name: str
    kind: GemmKind
    owner: str  # qualified name of the module whose forward holds the call; "" is the model itself
    weight: str | None  # qualified name of the Parameter; None where the weight is computed
    bias: str | None
    rows: RowCount  # M, of one call
    k: int
    n: int
    calls: int  # in one training forward; 0 where a module is never called
    calls_eval: int  # in one evaluation forward
    share: float  # of the model's forward GEMM FLOPs, all calls together, 0 to 1
    input_grad: bool  # whether the input needs a gradient, so that there is a dgrad
    fed_by: tuple[str, ...]  # operations that produce the input, nearest first: ("silu", "layer_norm")
    followed_by: tuple[str, ...]  # operations that consume the output, nearest first
    where: str  # "models.py:44", the call in the user's code; "" for a plain nn.Linear
    blocked: str | None = None  # why it cannot be patched; None where it can
    members: tuple[str, ...] = ()  # the sites that a mod made one of, as they are called without it

    @property
    def flops_per_row(self) -> int:
        """Multiply-adds count two."""
        return 2 * self.k * self.n
