"""Owners whose forwards are rewritten: traced once per group of equal ones, changed by mods, bound."""
