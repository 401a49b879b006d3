"""FP8 copies of a matrix as it is and transposed: quantised, requantised or moved as bytes."""
