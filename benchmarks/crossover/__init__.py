"""Crossover of FP8 and BF16 by M, K and N, from recorded parts: as tables and as a plot."""
