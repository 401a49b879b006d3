"""GEMMs whose K and N are padded to what kernels take."""
