"""Whole steps of a policy's own model in every variant, as training and serving loops run them."""
