"""GEMMs in Triton, with epilogues and in groups; generated packages do not call them yet."""
