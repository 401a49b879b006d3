"""From a module to statements: torch.fx, what it gets wrong, and the text that comes of it."""
