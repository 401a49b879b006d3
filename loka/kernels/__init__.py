"""Kernels: GEMMs of several libraries, fused Triton kernels as text, and measured times."""
