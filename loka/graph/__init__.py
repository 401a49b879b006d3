"""Forwards as straight-line statements: traced, checked for equivalence, and searched for patterns."""
