"""YAML as a tree with the position of every value, and merging of bases."""
