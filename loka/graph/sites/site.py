"""A GEMM of a model, as discovered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.numerics.enums import Gemm


class GemmKind(StrEnum):
    """The form in which a model writes a GEMM."""

    LINEAR = "linear"  # a plain nn.Linear that is called
    FUNCTIONAL_LINEAR = "functional_linear"  # F.linear on a Parameter
    MATMUL = "matmul"  # @, torch.matmul, torch.mm with one Parameter
    ADDMM = "addmm"  # torch.addmm with a Parameter
    EINSUM = "einsum"
    BMM = "bmm"  # batched or computed weights: no two-dimensional Parameter is an operand
    ATTENTION = "attention"  # nn.MultiheadAttention: a single opaque call
    CONVOLUTION = "convolution"  # of kernel size 1, a GEMM over the channels


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
    """One GEMM of the model: y = x @ weight.T with x of M x K and weight of N x K, in whatever form.

    `name` is the fully qualified name of the module (a plain nn.Linear) or of the Parameter; if neither is unique
    (computed weights, one Parameter used in several places), the owner's name and a number.
    """

    name: str
    kind: GemmKind
    owner: str  # qualified name of the module whose forward contains the call; "" is the model itself
    weight: str | None  # qualified name (loka.graph.sites.weights) of the Parameter; None if the weight is computed
    bias: str | None
    rows: RowCount  # M, of one call
    k: int
    n: int
    calls: int  # in one training forward; 0 if a module is never called
    calls_eval: int  # in one evaluation forward
    share: float  # of the model's forward GEMM FLOPs, all calls together, 0 to 1
    input_grad: bool  # True if a gradient arrives and the input needs one, so that there is a dgrad
    fed_by: tuple[str, ...]  # operations that produce the input, nearest first: ("silu", "layer_norm")
    followed_by: tuple[str, ...]  # operations that consume the output, nearest first
    where: str  # "models.py:44", the call in the user's code; "" for a plain nn.Linear
    blocked: str | None = None  # reason why it cannot be patched; None if it can
    # The modules whose forwards run the BatchNorms and dropouts in `fed_by`, and in `followed_by`; () without these.
    boundaries: tuple[tuple[str, ...], ...] = ()
    members: tuple[str, ...] = ()  # the sites that a mod merged into it, by their names without the mod
    weight_grad: bool = True  # True if a gradient arrives and the weight needs one, so that there is a wgrad

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names that rules know it by: those of the sites that a mod merged into it, or its own."""
        return self.members or (self.name,)

    @property
    def called(self) -> bool:
        """False for an nn.Linear whose forward runs in neither mode: it is no GEMM of the model."""
        return bool(self.calls or self.calls_eval)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs of one training step: those of the backward only where a gradient needs them."""
        needed = {Gemm.FPROP: True, Gemm.DGRAD: self.input_grad, Gemm.WGRAD: self.weight_grad}
        return tuple(gemm for gemm in Gemm if needed[gemm])

    @property
    def flops_per_row(self) -> int:
        """FLOPs of the forward per row; a multiply-add counts as two."""
        return 2 * self.k * self.n


@dataclass(frozen=True, slots=True)
class Opaque:
    """Products inside operations that LoKA does not replace, alike ones together; they count in the shares of sites."""

    what: str  # "gru", "conv1d", "forward of DIEN" for the products of a forward that torch does not read
    owners: tuple[str, ...]  # qualified names of the modules whose forwards compute them
    calls: int  # in one training forward
    flops: RowCount  # of all calls in one training forward, as a function of the batch
    share: float  # of the model's forward GEMM FLOPs
    share_eval: float  # of those of an evaluation forward
