"""Sums of products of matrices."""
