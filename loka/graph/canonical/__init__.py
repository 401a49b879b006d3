"""Canonical forms of what forwards compute, for recognition: equal where the same is computed, however written."""
