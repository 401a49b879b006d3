"""The C++ compiler that AOTInductor takes, and whether its packages can be loaded."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from torch._inductor.cpp_builder import get_cpp_compiler

SOURCE = '#include <stdexcept>\nvoid raise_one() { throw std::runtime_error("one"); }\n'
RUNTIMES = (b"libstdc++.so", b"libc++.so")  # the C++ library by the name that a shared object needs it by


def cpp_compiler() -> str:
    """The C++ compiler that Inductor finds (CXX, g++, clang++), or ""."""
    try:
        return get_cpp_compiler()
    except Exception:  # noqa: BLE001  (torch has several errors for it)
        return ""


def fault_of(compiler: str) -> str:
    """What keeps packages of this compiler from running, and what to do; "" where nothing does.

    A package of AOTInductor throws and catches, and passes streams, across the library of torch that loads it. One that
    has a libstdc++ of its own inside, as compilers link it whose folders have no shared one, fails at that: loading it
    ends the process by SIGSEGV, or with `create_func_( &container_handle_, ...) API call failed`.
    """
    if not compiler:
        return (
            "no C++ compiler is found (CXX, g++, clang++): AOTInductor, and Inductor on a CPU, cannot compile; "
            "install one, or set CXX"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "one.cpp", Path(folder) / "one.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            return f"{' '.join(command)} ends with status {ran.returncode}: {ran.stderr.strip()}; set CXX to another"
        if any(name in made.read_bytes() for name in RUNTIMES):
            return ""
    return (
        f"{compiler} links libstdc++ statically: packages of AOTInductor crash when they are loaded; "
        "set CXX to a compiler that has a shared one"
    )
