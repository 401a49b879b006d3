"""Ablation: subsets of a policy's mods, each run in several ways, measured and written as a report."""
