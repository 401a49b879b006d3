"""Residual sums that are computed and kept in a wider dtype."""
