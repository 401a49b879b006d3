"""Target devices of plans: properties, measured peaks, and launch parameters of kernels."""
