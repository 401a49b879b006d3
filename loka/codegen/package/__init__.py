"""A package as files: rendered, written so that an interrupt leaves no mix, and checked for freshness."""
