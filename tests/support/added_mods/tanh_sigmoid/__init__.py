"""Sigmoids by way of the hyperbolic tangent."""
