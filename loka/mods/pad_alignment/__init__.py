"""GEMMs whose K and N are padded to sizes that kernels support."""
