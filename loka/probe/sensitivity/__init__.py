"""The sensitivity of the loss to the errors of single GEMMs: a live model runs with them, and its outputs are compared."""
