"""Norms of the inputs of linears, in the places of norms of their outputs."""
