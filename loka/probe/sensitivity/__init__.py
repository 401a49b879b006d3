"""The loss that errors of single GEMMs cost: a live model runs with them, and its outputs are compared."""
