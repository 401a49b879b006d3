"""AOTInductor packages of a model in FP8 and in BF16 beside torch.compile and a CUDA graph, and why one crashes."""
