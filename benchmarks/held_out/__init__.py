"""How close predicted errors come to the errors on real batches that nothing was learned from."""
