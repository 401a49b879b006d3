"""Learns the operands of each GEMM in training, and the error that FP8 would have."""
