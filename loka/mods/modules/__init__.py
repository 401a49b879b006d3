"""Mods that change modules, one file each."""
