"""Owners whose forwards are rewritten: traced once for all that are alike, changed by mods, bound."""
