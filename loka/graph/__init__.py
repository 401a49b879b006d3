"""Forwards as straight-line statements: traced, shown to be the same function, and searched for patterns."""
