"""A plan and the templates in, the files of a package out: deterministic, stamped, safe against kills."""

from __future__ import annotations

from loka.codegen.check import Difference, Kind, check_package
from loka.codegen.render import render_package
from loka.codegen.write import Written, write_package

__all__ = ["Difference", "Kind", "Written", "check_package", "render_package", "write_package"]
