"""Functions of several linears, and of interactions, with their own backward: what their text is made of."""
