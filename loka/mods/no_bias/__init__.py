"""Linears without biases, but for final prediction layers."""
