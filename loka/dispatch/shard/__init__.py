"""Several ranks: FP8 all-gathers under FSDP2, and what ranks agree on."""
