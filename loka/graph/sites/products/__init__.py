"""The torch functions that multiply matrices: the sizes, the weight and the obstacle of each call."""
