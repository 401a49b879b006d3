"""One launch that quantizes all weights of a chain."""
