"""Long training runs in BF16 and in FP8, calm and with what goes wrong in training: curves, and NE at the end."""
