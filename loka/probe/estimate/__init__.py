"""Operands drawn from what was learned, and the error of each recipe on them."""
