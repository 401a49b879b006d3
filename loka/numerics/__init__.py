"""FP8 formats, the reference quantizers, scaled products and error metrics."""
