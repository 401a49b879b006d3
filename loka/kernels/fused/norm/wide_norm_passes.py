"""The launches of a backward over rows that no program holds (`wide_norm_launch`).

A forward's program takes whole rows, one after another, each chunk by chunk: once for the statistics of its norm, and
once for the result. Its values are written under the scale of the row before, while the maximum is found, and written
again where the row's own scale is another: after a LayerNorm of 123200 elements never for normal rows, for Student's
t with three degrees of freedom every second time. Scales that are no powers of two are nearly all different, so there
the maximum is found first. The row that one program on a multiprocessor works on stays in the L2 cache meanwhile. A
backward's program keeps to its columns, whose parameters and sums it holds, and goes down the rows; one launch finds
the sums of rows, by columns, with those of the columns, one the maxima, and one writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.kernels.fused.norm.norm_spec import NormBackward

SUMS, MAXIMA, WRITE = "sums", "maxima", "write"

_BY_COLUMNS = ("dweight", "dbias")  # found with the sums of rows
_MATRICES = ("residual_grad_in", "x", "times", "values", "dx", "residual_grad_out")


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of a backward."""

    kind: str  # SUMS, MAXIMA or WRITE
    function: str
    tensors: tuple[str, ...]  # that the kernel takes, in order
    sums: tuple[str, ...] = ()  # over columns, that it adds up

    @property
    def needs_offsets(self) -> bool:
        """Whether it reads or writes a matrix beside grad."""
        return any(name in _MATRICES for name in self.tensors)


def wide_norm_passes(spec: NormBackward) -> tuple[Pass, ...]:
    """A backward's launches, in order."""
    passes = []
    means = tuple(f"mean_{name}" for name in spec.traits.averages)  # of rows
    sums = tuple(name for name in spec.results if name in _BY_COLUMNS)
    if means or sums:
        found = tuple(f"sum_{name}" for name in spec.traits.averages)
        read = ("grad", "x", "add", "weight", "bias", "mean", "rstd")
        takes = tuple(name for name in spec.parameters if name in read)
        passes.append(Pass(SUMS, f"{spec.function}_sums", (*takes, *sums, *found), sums))
    takes = tuple(name for name in spec.parameters if name not in spec.how.parameters)
    gives = tuple(name for name in spec.results if name not in _BY_COLUMNS)
    if spec.quantize and spec.how.scaling == "rowwise":
        passes.append(Pass(MAXIMA, f"{spec.function}_maxima", (*takes, *means, "maximum")))
        means = (*means, "amax")
    scales = spec.how.parameters if spec.quantize else ()
    sums = tuple(name for name in gives if name == "dadd")
    passes.append(Pass(WRITE, spec.function, (*takes, *scales, *means, *gives), sums))
    return tuple(passes)
