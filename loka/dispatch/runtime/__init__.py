"""What generated functions call in each step: dtypes under autocast, saved tensors, rows."""
