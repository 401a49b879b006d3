"""Generated module classes, one for each binding: forwards as straight-line code, and the linears they call."""
