"""Tracing a module to statements: torch.fx, checks for what it misses, and printing."""
