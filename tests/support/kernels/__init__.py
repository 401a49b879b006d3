"""Kernel specs, their inputs and float64 oracles, and what compiled code is read for."""
