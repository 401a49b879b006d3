"""Norms and activations with what stands around them, quantized or not, forward and backward."""
