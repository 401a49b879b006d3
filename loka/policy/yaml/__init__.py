"""YAML as a tree in which every value knows its place; bases merged."""
