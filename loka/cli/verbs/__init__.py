"""The verbs, one file each: they parse, call and print."""
