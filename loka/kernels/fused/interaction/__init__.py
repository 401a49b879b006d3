"""Low-rank interactions of embeddings, and norms over concatenated rows, forward and backward."""
