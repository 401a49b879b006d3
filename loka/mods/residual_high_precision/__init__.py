"""Residual sums computed and kept in a wider dtype."""
