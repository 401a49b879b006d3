"""The forms of interactions: everything but the number of samples and the dtype that a part's time depends on.

`Part.around` has the form in words: "64 embeddings, rank 32, 32 sums, passing" of an FM interaction, "32 + 32 rows,
residual, layer_norm, weight, bias" of a concat_norm, "27 embeddings" of a dot interaction. `passing` matters only for
the gradients, and a forward's part does not have it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from loka.errors import InputError
from loka.kernels.fused.interaction.concat_norm import NORMS
from loka.kernels.measurements.parts import Part, PartKind

PASSING, RESIDUAL, WEIGHT, BIAS = "passing", "residual", "weight", "bias"


@dataclass(frozen=True, slots=True)
class FmForm:
    """An FM interaction of samples (n, d): pairwise products at low rank, and weighted sums."""

    embeddings: int  # n
    rank: int
    sums: int  # 0 for none
    passing: bool = False  # another gradient of the samples is added

    @property
    def words(self) -> str:
        """The form in words, for `Part.around`."""
        sums = [f"{self.sums} sums"] if self.sums else []
        return ", ".join([f"{self.embeddings} embeddings, rank {self.rank}", *sums, *_named(passing=self.passing)])

    def moved(self, columns: int, backward: bool) -> int:
        """Elements read and written for one sample, with d = `columns`."""
        sample, made = self.embeddings * columns, self.embeddings * self.rank + self.sums * columns
        return made + (sample * (3 if self.passing else 2) if backward else sample)


@dataclass(frozen=True, slots=True)
class ConcatNormForm:
    """A norm over concatenated samples: parts with the given rows, a residual, and a norm."""

    rows: tuple[int, ...]  # rows of each part
    residual: bool
    norm: str  # one of `concat_norm.NORMS`
    weight: bool
    bias: bool

    @property
    def words(self) -> str:
        """The form in words, for `Part.around`."""
        rows = f"{' + '.join(map(str, self.rows))} rows"
        flags = [*_named(residual=self.residual), self.norm, *_named(weight=self.weight, bias=self.bias)]
        return ", ".join([rows, *flags])

    def moved(self, columns: int, backward: bool) -> int:
        """Elements read and written for one sample, without the few of statistics and sums."""
        return sum(self.rows) * columns * (2 + self.residual + backward)


@dataclass(frozen=True, slots=True)
class DotForm:
    """A dot interaction of samples (n, d): the products of all pairs of rows."""

    embeddings: int  # n

    @property
    def words(self) -> str:
        """The form in words, for `Part.around`."""
        return f"{self.embeddings} embeddings"

    def moved(self, columns: int, backward: bool) -> int:
        """Elements read and written for one sample, with d = `columns`."""
        return self.embeddings * (columns * (2 if backward else 1) + self.embeddings)


Form = FmForm | ConcatNormForm | DotForm

_WORKS: dict[type[Form], tuple[PartKind, PartKind]] = {
    FmForm: (PartKind.FM_INTERACTION, PartKind.FM_INTERACTION_BACKWARD),
    ConcatNormForm: (PartKind.CONCAT_NORM, PartKind.CONCAT_NORM_BACKWARD),
    DotForm: (PartKind.DOT, PartKind.DOT_BACKWARD),
}
_NUMBER = re.compile(r"\d+")
BACKWARDS = frozenset(backward for _, backward in _WORKS.values())


def parts_of(form: Form, samples: int, columns: int, kernel: str, dtype: str = "bfloat16") -> tuple[Part, Part]:
    """The parts of an interaction's forward and gradients."""
    first, second = _WORKS[type(form)]
    forward = replace(form, passing=False) if isinstance(form, FmForm) else form
    return (
        Part(first, kernel, samples, columns, dtype=dtype, around=forward.words),
        Part(second, kernel, samples, columns, dtype=dtype, around=form.words),
    )


def family(work: PartKind) -> PartKind:
    """The forward's kind for an interaction's forward or gradients; any other kind unchanged."""
    return next((forward for forward, backward in _WORKS.values() if work is backward), work)


def moved(part: Part) -> int:
    """Elements that an interaction's kernel reads and writes, each once. Raises InputError for an unknown form."""
    return part.rows * form_of(part.work, part.around).moved(part.columns, part.work in BACKWARDS)


def unlike(one: Part, other: Part) -> int:
    """Number of words in which the forms of two parts of one kind differ, ignoring numbers."""
    return len(_flags(one.around) ^ _flags(other.around))


@cache
def form_of(work: PartKind, around: str) -> Form:
    """The form of a part of this kind. Raises InputError where the words name none."""
    words = around.split(", ") if around else []
    try:
        match family(work):
            case PartKind.FM_INTERACTION:
                return _fm_form(words)
            case PartKind.CONCAT_NORM:
                return _concat_norm_form(words)
            case PartKind.DOT:
                (embeddings,) = words
                return DotForm(int(embeddings.removesuffix(" embeddings")))
    except ValueError as error:
        raise InputError(f"no {work.value} has the form {around!r}: {error}; measure it again") from error
    raise InputError(f"{work.value} is no interaction, and has no form")


def _fm_form(words: Sequence[str]) -> FmForm:
    embeddings, rank, *rest = words
    sums = [int(word.removesuffix(" sums")) for word in rest if word.endswith(" sums")]
    _check_words([word for word in rest if not word.endswith(" sums")], (PASSING,))
    sizes = int(embeddings.removesuffix(" embeddings")), int(rank.removeprefix("rank "))
    return FmForm(*sizes, sums[0] if sums else 0, PASSING in rest)


def _concat_norm_form(words: Sequence[str]) -> ConcatNormForm:
    rows, *rest = words
    (norm,) = [word for word in rest if word in NORMS]
    _check_words(rest, (RESIDUAL, norm, WEIGHT, BIAS))
    counts = tuple(map(int, rows.removesuffix(" rows").split(" + ")))
    return ConcatNormForm(counts, RESIDUAL in rest, norm, WEIGHT in rest, BIAS in rest)


def _check_words(words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")


@cache
def _flags(around: str) -> frozenset[str]:
    """The words of a form without its numbers."""
    return frozenset(_NUMBER.sub("", word) for word in around.split(", "))


def _named(**present: bool) -> list[str]:
    return [name for name, there in present.items() if there]
