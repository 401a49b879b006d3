"""Linears that read one tensor, as one GEMM."""
