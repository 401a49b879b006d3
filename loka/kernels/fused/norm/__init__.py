"""Norms and activations with what stands around them, quantised or not, forward and backward."""
