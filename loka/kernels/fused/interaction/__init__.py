"""Low-rank interactions of embeddings, and norms over what is concatenated, forward and backward."""
