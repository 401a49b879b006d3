"""Benchmarks: speed against other libraries, recorded measurements, ablation of mods, quality over seeds."""
