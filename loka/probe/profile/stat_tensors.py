"""The statistics of a site as named tensors of a file, and back: names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.probe.profile.header import OperandCounts, SiteCounts, WeightNumbers
from loka.probe.profile.profile import SiteProfile
from loka.probe.stats.bins import RELATIVE_BINS, ROW_RMS_BINS, SPREAD_BINS, VALUE_BINS, VIEWS
from loka.probe.stats.site_stats import (
    CHECKS,
    FULL_WIDTH,
    JOINT,
    SKETCH,
    WEIGHT_ROWS,
    JointStats,
    LowRank,
    Moments,
    OperandStats,
    SiteStats,
    WeightStats,
)

Shape = tuple["int | Free", ...]
Read = Callable[[str, "ExpectedTensor"], Tensor]  # (name, expected tensor) -> the tensor, checked


@dataclass(frozen=True, slots=True)
class Free:
    """A dimension that the file determines, up to `most`."""

    most: int

    def __str__(self) -> str:
        return f"at most {self.most}"


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Requirements on a tensor. Indices are below `below`; all other int64 tensors are counts.

    Floats that are not `signed`, such as maxima and sums of squares, are 0 or more.
    """

    shape: Shape
    dtype: torch.dtype = torch.float64
    below: int | None = None
    finite: bool = True
    signed: bool = True

    def mismatch(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """The mismatch of a shape and dtype, in words; None if they fit."""
        fits = len(shape) == len(self.shape) and all(
            size <= wanted.most if isinstance(wanted, Free) else size == wanted
            for size, wanted in zip(shape, self.shape, strict=True)
        )
        if fits and dtype == self.dtype:
            return None
        wanted = ", ".join(str(size) for size in self.shape)
        return f"is {dtype} of shape {shape}, but must be {self.dtype} of shape ({wanted})"

    def bad_values(self, tensor: Tensor) -> str | None:
        """The error in the values of a tensor of the right shape and dtype, in words; None if they are valid."""
        if tensor.numel() == 0:
            return None
        if tensor.is_floating_point():
            if self.finite and not bool(tensor.isfinite().all()):
                return "holds NaN or infinity"
            return None if self.signed or float(tensor.min()) >= 0.0 else "holds a negative number"
        if int(tensor.min()) < 0:
            return "holds a negative number"
        if self.below is not None and int(tensor.max()) >= self.below:
            return f"holds {int(tensor.max())}, but must stay below {self.below}"
        return None


_COHERENCE = ExpectedTensor((2,))  # JointStats.coherent and .incoherent


def site_counts(stats: SiteStats) -> SiteCounts:
    """The scalar fields of a site's statistics, for the header."""
    weight = stats.weight
    return SiteCounts(
        input=_operand_counts(stats.input),
        grad_output=_operand_counts(stats.grad_output),
        joint=None if stats.joint is None else stats.joint.moments.count,
        weight=None
        if weight is None
        else WeightNumbers(
            weight.step, weight.updates, float(weight.amax), weight.nonfinite, weight.u.error, weight.v.error
        ),
    )


def site_tensors(stats: SiteStats) -> Iterator[tuple[str, Tensor, ExpectedTensor]]:
    """The tensors of a site's statistics, with their names within the site."""
    for operand in (stats.input, stats.grad_output):
        if operand is not None:
            width = _width(operand.operand, stats.k, stats.n)
            for part, expected in _operand(width).items():
                yield f"{operand.operand}/{part}", getattr(operand, part), expected
            yield from _moments_tensors(f"{operand.operand}/moments", operand.moments, width)
    if stats.joint is not None:
        joint = stats.joint
        for part, expected in _joint(stats.k, stats.n).items():
            yield f"joint/{part}", getattr(joint, part), expected
        width = joint.input_features.numel() + joint.grad_features.numel()
        yield "joint/coherence", torch.tensor([joint.coherent, joint.incoherent], dtype=torch.float64), _COHERENCE
        yield from _moments_tensors("joint/moments", joint.moments, width)
    if stats.weight is not None:
        rows, columns = stats.weight.row_index.numel(), stats.weight.column_index.numel()
        for part, expected in {**_kept(stats.k, stats.n), **_weight(stats.k, stats.n, rows, columns)}.items():
            yield f"weight/{part}", getattr(stats.weight, part), expected
        for side, size in (("u", stats.n), ("v", stats.k)):
            for part, expected in _low_rank(size).items():
                yield f"weight/{side}/{part}", getattr(getattr(stats.weight, side), part), expected


def site_stats(site: SiteProfile, counts: SiteCounts, read: Read) -> SiteStats:
    """The statistics of a site from its scalars and tensors. `read` checks each tensor and raises InputError."""
    return SiteStats(
        name=site.name,
        k=site.k,
        n=site.n,
        input=_operand_stats(Operand.INPUT, counts.input, site.k, read),
        grad_output=_operand_stats(Operand.GRAD_OUTPUT, counts.grad_output, site.n, read),
        joint=None if counts.joint is None else _joint_stats(counts.joint, site, read),
        weight=None if counts.weight is None else _weight_stats(counts.weight, site, read),
    )


def prepared(name: str, tensor: Tensor, expected: ExpectedTensor) -> Tensor:
    """A tensor ready for writing: on the CPU, contiguous, of the expected dtype.

    Raises InputError if it does not fit `expected`.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.float32 and expected.dtype == torch.float64:
        tensor = tensor.double()  # without loss
    mismatch = expected.mismatch(tuple(tensor.shape), tensor.dtype) or expected.bad_values(tensor)
    if mismatch is not None:
        raise InputError(f"{name} {mismatch}")
    return tensor.contiguous()


def _width(operand: Operand, k: int, n: int) -> int:
    return k if operand is Operand.INPUT else n


def _operand(width: int) -> dict[str, ExpectedTensor]:
    return {
        "values": ExpectedTensor((width, VALUE_BINS), torch.int64),
        "relative": ExpectedTensor((len(VIEWS), RELATIVE_BINS), torch.int64),
        "row_rms": ExpectedTensor((ROW_RMS_BINS,), torch.int64),
        "row_spread": ExpectedTensor((SPREAD_BINS,), torch.int64),
        "block_spread": ExpectedTensor((SPREAD_BINS,), torch.int64),
        "column_amax": ExpectedTensor((width,), signed=False),
        "call_amax": ExpectedTensor((ROW_RMS_BINS,), torch.int64),
    }


def _moments(width: int) -> dict[str, ExpectedTensor]:
    columns = width if width <= FULL_WIDTH else SKETCH + CHECKS
    return {
        "mean": ExpectedTensor((width,)),
        "diagonal": ExpectedTensor((width,), signed=False),
        "comoment": ExpectedTensor((width, columns)),
    }


def _joint(k: int, n: int) -> dict[str, ExpectedTensor]:
    return {
        "input_features": ExpectedTensor((Free(min(JOINT, k)),), torch.int64, below=k),
        "grad_features": ExpectedTensor((Free(min(JOINT, n)),), torch.int64, below=n),
    }


def _kept(k: int, n: int) -> dict[str, ExpectedTensor]:
    """Indices of the kept rows and columns of a weight."""
    return {
        "row_index": ExpectedTensor((Free(min(WEIGHT_ROWS, n)),), torch.int64, below=n),
        "column_index": ExpectedTensor((Free(min(WEIGHT_ROWS, k)),), torch.int64, below=k),
    }


def _weight(k: int, n: int, rows: int, columns: int) -> dict[str, ExpectedTensor]:
    """The other tensors of a weight with the given number of kept rows and columns."""
    return {
        "row_mean": ExpectedTensor((n,)),
        "column_mean": ExpectedTensor((k,)),
        "rows": ExpectedTensor((rows, k), torch.float32, finite=False),  # unmodified elements of the weight
        "columns": ExpectedTensor((n, columns), torch.float32, finite=False),
        "row_amax": ExpectedTensor((n,), signed=False),
        "column_amax": ExpectedTensor((k,), signed=False),
        "values": ExpectedTensor((VALUE_BINS,), torch.int64),
    }


def _low_rank(size: int) -> dict[str, ExpectedTensor]:
    return {"factor": ExpectedTensor((size, Free(size))), "diagonal": ExpectedTensor((size,), signed=False)}


def _moments_tensors(prefix: str, moments: Moments, width: int) -> Iterator[tuple[str, Tensor, ExpectedTensor]]:
    for part, expected in _moments(width).items():
        yield f"{prefix}/{part}", getattr(moments, part), expected


def _operand_counts(stats: OperandStats | None) -> OperandCounts | None:
    if stats is None:
        return None
    return OperandCounts(
        stats.calls, stats.rows, stats.sampled, stats.nonfinite, stats.nonfinite_calls, stats.moments.count
    )


def _read_all(prefix: str, table: dict[str, ExpectedTensor], read: Read) -> dict[str, Tensor]:
    return {part: read(f"{prefix}/{part}", expected) for part, expected in table.items()}


def _read_moments(prefix: str, count: int, width: int, read: Read) -> Moments:
    return Moments(count=count, **_read_all(prefix, _moments(width), read))


def _operand_stats(operand: Operand, counts: OperandCounts | None, width: int, read: Read) -> OperandStats | None:
    if counts is None:
        return None
    return OperandStats(
        operand=operand,
        calls=counts.calls,
        rows=counts.rows,
        sampled=counts.sampled,
        nonfinite=counts.nonfinite,
        nonfinite_calls=counts.nonfinite_calls,
        moments=_read_moments(f"{operand}/moments", counts.count, width, read),
        **_read_all(operand, _operand(width), read),
    )


def _joint_stats(count: int, site: SiteProfile, read: Read) -> JointStats:
    features = _read_all("joint", _joint(site.k, site.n), read)
    width = sum(index.numel() for index in features.values())
    coherent, incoherent = read("joint/coherence", _COHERENCE).tolist()
    return JointStats(
        features["input_features"],
        features["grad_features"],
        _read_moments("joint/moments", count, width, read),
        coherent,
        incoherent,
    )


def _weight_stats(numbers: WeightNumbers, site: SiteProfile, read: Read) -> WeightStats:
    kept = _read_all("weight", _kept(site.k, site.n), read)
    rows, columns = kept["row_index"].numel(), kept["column_index"].numel()
    return WeightStats(
        step=numbers.step,
        updates=numbers.updates,
        amax=numbers.amax,
        nonfinite=numbers.nonfinite,
        u=LowRank(error=numbers.u_error, **_read_all("weight/u", _low_rank(site.n), read)),
        v=LowRank(error=numbers.v_error, **_read_all("weight/v", _low_rank(site.k), read)),
        **kept,
        **_read_all("weight", _weight(site.k, site.n, rows, columns), read),
    )
