"""Matrix products in Triton, with epilogues and in groups; no generated package calls one yet."""
