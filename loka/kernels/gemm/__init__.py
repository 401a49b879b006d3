"""FP8 GEMMs, one file per library: support, availability, and the operator."""
