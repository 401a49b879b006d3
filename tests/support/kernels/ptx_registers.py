"""Halves of words that compiled kernels read and never set."""

from __future__ import annotations

import re

# Instructions whose first operand is not a register that they set.
_SETTING_NOTHING = ("st", "red", "bar", "bra", "ret", "cp", "fence", "mbarrier", "membar", "prefetch", "wgmma")
_REGISTER = re.compile(r"%[a-z]+\d+\b")
_PACKING = re.compile(r"mov\.b32\s+(%r\d+), \{(%rs\d+), (%rs\d+)\}")
_TAKING_ONE_HALF = re.compile(r"mov\.b32\s+\{(_|%rs\d+), (_|%rs\d+)\}, (%r\d+)")


def unset_halves(ptx: str) -> set[str]:
    """Registers of 16 bits that a kernel reads, and that no instruction sets.

    Where half a word is not needed, LLVM leaves it unset, which is right in PTX. ptxas 12.8 (of Triton 3.6) builds
    wrong bytes from FP8 conversions that share a word with such a half: it merges them with whatever a register holds.
    A word that is packed only for its other half to be taken out again, as BF16 values are, is no such word.
    """
    read: set[str] = set()
    written: set[str] = set()
    words: dict[str, tuple[str, str]] = {}  # what a word is packed from
    halves_read: dict[str, set[int]] = {}
    for line in ptx.splitlines():
        instruction = re.sub(r"^@!?%p\d+\s+", "", line.strip().lstrip("{ "))
        name, *rest = instruction.split(None, 1)[:2] or [""]
        if not rest or name.startswith((".", "//", "$")):
            continue
        registers = _REGISTER.findall(rest[0])
        first = re.match(r"\{[^}]*\}|[^,;]+", rest[0])
        sets = 0 if name.partition(".")[0] in _SETTING_NOTHING else len(_REGISTER.findall(first[0] if first else ""))
        written.update(registers[:sets])
        if packing := _PACKING.match(instruction):
            words[packing[1]] = (packing[2], packing[3])
            continue
        read.update(registers[sets:])
        taking = _TAKING_ONE_HALF.match(instruction)
        taken = {half for half in (0, 1) if taking[half + 1] != "_"} if taking else {0, 1}
        for register in registers[sets:]:
            halves_read.setdefault(register, set()).update(taken)
    for word, halves in words.items():
        read.update(halves[half] for half in halves_read.get(word, set()))
    return {register for register in read - written if register.startswith("%rs")}


def rounding_errors(ptx: str) -> list[str]:
    """The fused multiply-adds that subtract the rounded product of their own factors, as an x - x of a product gives.

    Registers of PTX are assigned once, so that their names tell.
    """
    products = {found[1]: (found[2], found[3]) for found in re.finditer(r"mul\.f32 \t(\S+), (\S+), (\S+);", ptx)}
    negated = {found[1]: found[2] for found in re.finditer(r"neg\.f32 \t(\S+), (\S+);", ptx)}
    fused = re.finditer(r"fma\.rn\.f32 \t\S+, (\S+), (\S+), (\S+);", ptx)
    return [each[0] for each in fused if products.get(negated.get(each[3], "")) == (each[1], each[2])]
