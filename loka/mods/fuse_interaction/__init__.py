"""Mixing layers, joins and cross layers, computed by kernels of their own."""
