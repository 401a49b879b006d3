"""Checksum of a profile file: the sha256 of all its bytes, in its metadata under `loka.sha256`.

The 64 digits of the checksum itself are hashed as zeros.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from loka.paths import open_plain

KEY = "loka.sha256"
LENGTH = 8  # bytes of the length of the header, with which a safetensors file begins
_METADATA = b'{"__metadata__":{'
_FIELD = f'"{KEY}":"'.encode()  # never part of a string in the header: quotes are escaped there
_ZEROS = b"0" * 64
_CHUNK = 1 << 20


def with_checksum(data: bytes) -> tuple[bytes, memoryview]:
    """Adds the checksum to a safetensors file. Returns the file in two parts: length and header, and tensors.

    The key is the first one of the metadata; the library itself would write keys in random order.
    """
    start = LENGTH + int.from_bytes(data[:LENGTH], "little")
    tensors = memoryview(data)[start:]
    header = data[LENGTH:start].rstrip(b" ")
    place = header.index(_METADATA) + len(_METADATA)
    header = b"".join((header[:place], _FIELD, _ZEROS, b'",', header[place:]))
    header = header.ljust(-(-len(header) // LENGTH) * LENGTH)  # tensors start at a multiple of 8, as in the library
    whole = len(header).to_bytes(LENGTH, "little") + header
    digest = hashlib.sha256(whole)
    digest.update(tensors)
    return whole.replace(_FIELD + _ZEROS, _FIELD + digest.hexdigest().encode(), 1), tensors


def is_whole(path: Path) -> bool | None:
    """True if the checksum of a safetensors file is correct, None if it has none. Raises OSError."""
    with open_plain(path, largest=None) as file:
        length = file.read(LENGTH)
        header = file.read(int.from_bytes(length, "little"))
        place = header.find(_FIELD) + len(_FIELD)
        if place < len(_FIELD):
            return None
        end = place + len(_ZEROS)
        digest = hashlib.sha256(length + header[:place] + _ZEROS + header[end:])
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return header[place:end] == digest.hexdigest().encode()
