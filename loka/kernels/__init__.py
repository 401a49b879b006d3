"""Whether a GEMM can run in FP8 on a device, the operator that runs it, and the count of what ran."""
