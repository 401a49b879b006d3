"""A package as files: rendered, written so that no kill leaves a mix, and checked for freshness."""
