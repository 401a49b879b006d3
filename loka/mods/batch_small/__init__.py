"""Small linears of one shape over different tensors, as one batched GEMM."""
