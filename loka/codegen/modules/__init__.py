"""One class for each binding: forwards as straight-line text, and the linears that they call."""
