"""Triton kernels that generated packages contain: what each is made for, how it is launched, its reference."""
