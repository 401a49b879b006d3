"""Every subset of a policy's mods in every way of running the model: measured, and written as a report."""
