"""The GEMMs of a model, as queries on the graphs of its forwards."""
