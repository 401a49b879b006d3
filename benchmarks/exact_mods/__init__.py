"""Speedup of each mod that rewrites forwards on small models, measured on a GPU."""
