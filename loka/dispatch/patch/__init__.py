"""The Patch returned by `apply`: verify, keep, remove, refresh, and the search for a NaN."""
