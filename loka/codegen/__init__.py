"""Generation of packages: from a plan and the templates to files; deterministic, stamped, and safe to interrupt."""

from __future__ import annotations

from loka.codegen.package.check_package import Difference, DifferenceKind, check_package
from loka.codegen.package.generate_package import GeneratedPackage, default_folder, generate
from loka.codegen.package.render_package import render_package
from loka.codegen.package.write import WrittenPackage, write_package

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
