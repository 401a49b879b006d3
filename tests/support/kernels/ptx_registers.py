"""Halves of words that compiled kernels read and never set."""

from __future__ import annotations

import re

# Instructions whose first operand is not a register that they set.
_SETTING_NOTHING = ("st", "red", "bar", "bra", "ret", "cp", "fence", "mbarrier", "membar", "prefetch", "wgmma")
_REGISTER = re.compile(r"%[a-z]+\d+\b")


def unset_halves(ptx: str) -> set[str]:
    """Registers of 16 bits that a kernel reads and no instruction sets.

    Where half a word is not needed, LLVM leaves it unset, which is right in PTX. ptxas 12.8 (of Triton 3.6) builds
    wrong bytes from FP8 conversions that share a word with such a half: it merges them with whatever a register holds.
    """
    read: set[str] = set()
    written: set[str] = set()
    for line in ptx.splitlines():
        instruction = re.sub(r"^@!?%p\d+\s+", "", line.strip().lstrip("{ "))
        name, *rest = instruction.split(None, 1)[:2] or [""]
        if not rest or name.startswith((".", "//", "$")):
            continue
        registers = _REGISTER.findall(rest[0])
        first = re.match(r"\{[^}]*\}|[^,;]+", rest[0])
        sets = 0 if name.partition(".")[0] in _SETTING_NOTHING else len(_REGISTER.findall(first[0] if first else ""))
        written.update(registers[:sets])
        read.update(registers[sets:])
    return {register for register in read - written if register.startswith("%rs")}
