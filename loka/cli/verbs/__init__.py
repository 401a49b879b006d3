"""The verbs, one file each: they parse options, call and print."""
