"""Biases added after the products of linears."""
