"""Writes the golden packages anew: `python -m tests.codegen.golden`."""

from tests.support.codegen.golden_plans import renew

renew()
