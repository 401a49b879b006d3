"""FP8 copies of a matrix, row-major and transposed: quantized, requantized or copied as bytes."""
