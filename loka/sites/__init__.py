"""Discovery of every GEMM of a model without running it on data."""
