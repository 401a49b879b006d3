"""What `apply` returns: verify, keep, remove, refresh, and the search for a NaN."""
