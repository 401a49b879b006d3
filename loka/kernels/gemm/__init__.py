"""FP8 GEMMs, one file a library: can it run this one, why not, run it."""
