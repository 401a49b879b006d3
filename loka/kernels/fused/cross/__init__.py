"""Gradients of a cross layer (DCNv2) in one kernel."""
