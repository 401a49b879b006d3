"""Norms of the inputs of linears, in place of norms of their outputs."""
