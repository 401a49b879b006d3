"""Unset halves of words: those that a whole word carries on are found, those that are dropped again are not."""

from __future__ import annotations

from tests.support.kernels.ptx_registers import unset_halves

PACKED = """
    mov.u16 %rs1, 0;
    @%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
    mov.b32 %r1, {%rs1, %rs2};
"""


def test_a_half_that_a_conversion_reads_is_found() -> None:
    assert unset_halves(PACKED + "cvt.rn.f16x2.e4m3x2 %r2, %rs2;") == {"%rs2"}


def test_a_half_of_a_word_that_is_stored_is_found() -> None:
    assert unset_halves(PACKED + "st.global.b32 [ %rd2 + 0 ], { %r1 };") == {"%rs2"}


def test_a_half_that_is_taken_out_again_is_found() -> None:
    assert unset_halves(PACKED + "mov.b32 {_, %rs3}, %r1;\n st.global.b16 [ %rd2 + 0 ], { %rs3 };") == {"%rs2"}


def test_a_half_that_is_dropped_again_is_not() -> None:
    assert not unset_halves(PACKED + "mov.b32 {%rs3, _}, %r1;\n st.global.b16 [ %rd2 + 0 ], { %rs3 };")
    assert not unset_halves(PACKED)
