"""Mods: changes to a model that make more of it safe and fast in FP8. One file a mod; `catalogue` has them all."""
