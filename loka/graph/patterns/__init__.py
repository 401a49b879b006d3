"""Patterns that kernels can fuse: linear chains, interactions, norms after concatenations."""
