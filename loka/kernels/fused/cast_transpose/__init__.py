"""FP8 copies of a matrix, row-major and transposed: quantised, requantised or copied as bytes."""
