"""Comparison of predicted errors with errors on held-out real batches."""
