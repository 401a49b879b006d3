"""A product with both matrices of a mixing layer, split afterwards, is a product with each."""

from __future__ import annotations

import pytest

from loka.graph.canonical.split_products import split_products
from loka.graph.ir import PART, Ref, RefKind, SiteCall, Statement

SHAPES = {"x": (None, 6, 5), "both": (None, 8, 5), "a": (None, 3, 5), "b": (None, 5, 5), "other": (None, 8, 5)}
FLIP = ".transpose(-1, -2)"
FROM_THE_LEFT = Statement(
    "both",
    "matmul",
    "torch.matmul({0}, {1})",
    (Ref(RefKind.ATTRIBUTE, "self.w"), Ref(RefKind.LOCAL, "x")),
    SiteCall("w", "{1}" + FLIP, "{0}", None, "{0}" + FLIP),
)


def parts(*lines: str) -> list[Statement]:
    """Statements "a = getitem both: {0}[:, :3]": target, op, operand, template."""
    made = []
    for line in lines:
        head, _, template = line.partition(": ")
        target, _, op, *names = head.split()
        made.append(Statement(target, op, template, tuple(Ref(RefKind.LOCAL, name) for name in names)))
    return made


def split(
    product: Statement,
    *lines: str,
    read: tuple[str, ...] = ("a", "b"),
    shapes: dict[str, tuple[int | None, ...]] = SHAPES,
) -> list[str]:
    """The text of the statements; those of `read` are read by the forward."""
    steps = [product, *parts(*lines)]
    readers = {name: {i for i, s in enumerate(steps) if any(r.text == name for r in s.operands)} for name in shapes}
    readers |= {"s": {i for i, s in enumerate(steps) if any(r.text == "s" for r in s.operands)}}
    for name in read:
        readers[name] = {*readers[name], len(steps)}
    made = split_products(steps, shapes, readers)
    if made[0].op == PART:
        assert list(made[0].written) == steps
        assert made[-1].target == steps[-1].target  # the group ends with what it stands for
    return [step.text() for step in made]


SPLIT = ("s = split both: torch.split({0}, [3, 5], dim=1)", "a = getitem s: {0}[0]", "b = getitem s: {0}[1]")
WAYS = {
    "split": SPLIT,
    "slices": ("a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 3:]"),
    "narrow": ("a = narrow both: {0}.narrow(1, 0, 3)", "b = narrow both: {0}.narrow(1, 3, 5)"),
    "tensor_split": ("s = tensor_split both: {0}.tensor_split([3], dim=-2)", *SPLIT[1:]),
}


@pytest.mark.parametrize("lines", WAYS.values(), ids=WAYS)
def test_the_rows_of_a_matrix(lines: tuple[str, ...]) -> None:
    assert split(FROM_THE_LEFT, *lines) == ["a = torch.matmul(self.w[0:3], x)", "b = torch.matmul(self.w[3:8], x)"]


def test_the_columns_of_a_matrix() -> None:
    text = "torch.einsum('bnd,nr->bdr', {0}, {1})"
    call = SiteCall("w", "{0}.permute(0, 2, 1)", "{1}.t()", None, "{0}")
    refs = Ref(RefKind.LOCAL, "x"), Ref(RefKind.ATTRIBUTE, "self.w")
    shapes = {"x": (None, 6, 5), "both": (None, 5, 8), "a": (None, 5, 3), "b": (None, 5, 5)}
    lines = ("a = getitem both: {0}[..., :3]", "b = getitem both: {0}[..., 3:]")
    found = split(Statement("both", "einsum", text, refs, call), *lines, shapes=shapes)
    assert found == [
        "a = torch.einsum('bnd,nr->bdr', x, self.w[:, 0:3])",
        "b = torch.einsum('bnd,nr->bdr', x, self.w[:, 3:8])",
    ]


NEARLY = {
    "one part": (("a = getitem both: {0}[:, :3]",), ("a",)),
    "overlapping": (("a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 2:7]"), ("a", "b")),
    "read as a whole": (SPLIT, ("a", "b", "both")),
    "changed": ((*SPLIT[:2], "b = add both: {0}[:, 3:] + 1"), ("a", "b")),
    "in place": ((*SPLIT[:2], "_ = add_ a: {0}.add_(1)", SPLIT[2]), ("a", "b")),
}


@pytest.mark.parametrize(("lines", "read"), NEARLY.values(), ids=NEARLY)
def test_what_is_not_all_of_a_product_in_parts_stays(lines: tuple[str, ...], read: tuple[str, ...]) -> None:
    stays = [step.text() for step in (FROM_THE_LEFT, *parts(*lines))]
    assert split(FROM_THE_LEFT, *lines, read=read) == stays


def test_a_linear_that_is_split_stays() -> None:
    """It sums over the last dimension: one FP8 GEMM, as of queries, keys and values."""
    refs = Ref(RefKind.LOCAL, "x"), Ref(RefKind.ATTRIBUTE, "self.w")
    linear = Statement(
        "both", "linear", "torch.nn.functional.linear({0}, {1})", refs, SiteCall("w", "{0}", "{1}", None, "{0}")
    )
    shapes = {"x": (None, 5, 6), "both": (None, 5, 8), "a": (None, 5, 3), "b": (None, 5, 5)}
    lines = ("a = getitem both: {0}[..., :3]", "b = getitem both: {0}[..., 3:]")
    assert split(linear, *lines, shapes=shapes) == [step.text() for step in (linear, *parts(*lines))]
