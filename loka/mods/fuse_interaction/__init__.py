"""FM interactions, concatenation norms and cross layers in their own kernels."""
