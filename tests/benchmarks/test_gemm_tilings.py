"""The benchmark of rendered products, as far as it runs without a GPU: what it measures, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gemm_tilings.__main__ import main, parse
from benchmarks.gemm_tilings.gemm_work import GemmWork, copies_of, sqnr_of
from benchmarks.gemm_tilings.tiling_times import SHAPES, candidates_of, load
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates
from loka.numerics.enums import Accumulation


@pytest.mark.parametrize(("kind", "shapes"), SHAPES.items())
def test_every_tiling_of_both_accumulations_and_of_bfloat16_is_measured(kind, shapes):
    for shape in shapes:
        found = list(candidates_of(kind, shape))
        assert {(c.spec.operands, c.spec.accumulation) for c in found} == {
            ("e4m3", Accumulation.PRECISE),
            ("e4m3", Accumulation.FAST),
            ("bfloat16", Accumulation.PRECISE),
        }
        for spec in {c.spec for c in found}:
            assert tuple(c.tiling for c in found if c.spec == spec) == candidates(spec)


def test_a_candidate_is_an_operator_whose_error_is_told(tmp_path):
    candidate = next(c for c in candidates_of("gemm", (8, 16, 32)) if c.spec.operands == "bfloat16")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (8, 16))
    operator = load(candidate, tmp_path)
    right, wrong = (
        GemmWork(((a, b),), product) for product in (a.float() @ b.float().T, a.float() @ b.float().T + 1.0)
    )
    assert sqnr_of(operator, right) > 40.0
    assert sqnr_of(operator, wrong) < 20.0
    assert load(candidate, tmp_path) is operator  # written once


def test_copies_exceed_the_cache_or_are_many():
    small, large = torch.zeros(1), torch.zeros(30 << 20, dtype=torch.uint8)
    assert len(copies_of((small,))) == 40
    copies = copies_of((large, small))
    assert sum(tensor.nbytes for copy in copies for tensor in copy) >= 160 << 20
    assert copies[0][0].data_ptr() != copies[1][0].data_ptr()


def test_the_command_line():
    assert parse(["--gemm", "1,2,3", "4,5,6", "--jobs", "2"]).gemm == [(1, 2, 3), (4, 5, 6)]
    with pytest.raises(SystemExit):
        parse(["--split", "1,2"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
