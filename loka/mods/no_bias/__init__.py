"""Linears without biases, except final prediction layers."""
