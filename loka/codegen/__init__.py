"""Generation of packages: from a plan and the templates to files; deterministic, stamped, and safe to interrupt."""

from __future__ import annotations

from loka.codegen.generation import (
    Difference,
    DifferenceKind,
    GeneratedPackage,
    check_package,
    default_folder,
    generate,
)
from loka.codegen.package_folder import WrittenPackage, write_package
from loka.codegen.package_text import render_package

__all__ = [
    "Difference",
    "DifferenceKind",
    "GeneratedPackage",
    "WrittenPackage",
    "check_package",
    "default_folder",
    "generate",
    "render_package",
    "write_package",
]
