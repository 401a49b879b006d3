"""Execution options of each site, their latency, and the choice among them."""
