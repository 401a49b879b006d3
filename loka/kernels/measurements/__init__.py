"""Measured times and errors of parts: files, look-up and interpolation."""
