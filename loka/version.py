"""The version of LoKA: said here alone; the package's metadata and everything that is written take it from here."""

from __future__ import annotations

__version__ = "0.2.0"
