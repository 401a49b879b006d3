"""Kernels: GEMMs of several libraries, fused Triton kernels as text, and what each costs when measured."""
