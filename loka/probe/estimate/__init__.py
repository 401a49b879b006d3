"""Operands drawn from the statistics, and the error of each recipe on them."""
