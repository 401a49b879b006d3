"""Finding every GEMM of a model, and rewriting forwards, without running the model on data."""
