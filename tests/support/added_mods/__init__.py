"""Mods that only tests have, a folder each as in `loka/mods`: one that changes modules, one sites, one owners."""
