"""Triton kernels of generated packages: their specs, launches and references."""
