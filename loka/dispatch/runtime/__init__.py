"""Functions that generated code calls in each step: dtypes under autocast, saved tensors, rows."""
