"""Subjects of benchmarks: models unchanged, with other libraries, and with generated packages."""
