"""FP8 all-gathers under FSDP2."""
