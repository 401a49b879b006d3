"""Capture of sampled steps of a live model: operands of each site, as matrices."""
