"""FP8 formats, the reference quantisers, scaled products and error metrics."""
