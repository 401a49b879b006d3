"""`loka.Guard`: compares FP8 with the model's own GEMMs while it trains, and falls back where they part."""
