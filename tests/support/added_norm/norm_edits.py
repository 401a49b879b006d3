"""What is written to add the norm: for each file of the checklist, text and the line that it goes before."""

from __future__ import annotations

from tests.support.edited_loka import Edit

EDITS = (
    Edit(
        "loka/graph/patterns/norm.py",
        '        "rms_norm": TorchNorm(nn.RMSNorm),\n',
        r"""
        "normalize": TorchNorm(fixed={"p": 2.0, "dim": -1, "out": None}),
""",
    ),
    Edit(
        "loka/kernels/fused/norm/norms.py",
        "NO_NORM = NormTraits(",
        """\
def _normalize(x: Tensor, eps: float, block: int) -> Normalised:
    rstd = 1.0 / x.square().sum(1).sqrt().clamp(min=eps)
    return Normalised(x * rstd[:, None], x.new_empty(0), rstd)


def _normalize_gradient(dn: Tensor, normed: Normalised, eps: float, block: int) -> Tensor:
    along = torch.where(normed.rstd * eps < 1.0, (dn * normed.n).sum(1), 0.0)
    return (dn - normed.n * along[:, None]) * normed.rstd[:, None]


""",
    ),
    Edit(
        "loka/kernels/fused/norm/norms.py",
        '        "rms_norm": NormTraits(',
        """\
        "normalize": NormTraits(
            "L2 norm", _normalize, _normalize_gradient, saved=("rstd",), averages=("dn_n",), eps_in_backward=True
        ),
""",
    ),
    Edit(
        "templates/triton/device/norms.py.j2",
        "    if rstd_ptr is not None:\n        tl.store(rstd_ptr + row, rstd, mask=valid)\n",
        """\
    if NORM == "normalize":
        rstd = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, -1)), EPS)
        n = x * by_row(rstd, ROWS)
""",
    ),
    Edit(
        "templates/triton/device/norms.py.j2",
        "    return mean, rstd\n",
        """\
    if NORM == "normalize":
        rstd = 1.0 / tl.maximum(tl.sqrt(tl.sum(squares, 0)), EPS)
""",
    ),
    Edit(
        "templates/triton/device/norms.py.j2",
        "    return dn\n",
        """\
    if NORM == "normalize":
        along = tl.where(rstd * EPS < 1.0, mean_dn_n * WIDTH, 0.0)
        dn = (dn - n * by_row(along, ROWS)) * by_row(rstd, ROWS)
""",
    ),
)
