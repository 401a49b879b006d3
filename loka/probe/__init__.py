"""Learning what each GEMM's operands look like in training, and what FP8 would cost it."""
