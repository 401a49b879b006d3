"""Writes the golden packages anew: `python -m tests.support.codegen.renew_golden`."""

from tests.support.codegen.golden_plans import renew

renew()
