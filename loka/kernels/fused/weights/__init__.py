"""One launch that quantises all weights of a chain."""
