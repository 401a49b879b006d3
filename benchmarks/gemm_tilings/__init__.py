"""Matrix products in Triton, in every tiling of their table, against cuBLAS: no generated package calls one."""
