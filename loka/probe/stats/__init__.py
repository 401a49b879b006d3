"""Statistics of operands and weights, merged exactly over steps, ranks and runs."""
