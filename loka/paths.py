"""Where files may be put by a rename: in the place of a plain file or of none, never of a device or a pipe."""

from __future__ import annotations

import os
from pathlib import Path

from loka.errors import InputError


def resolved_path(path: Path) -> Path:
    """The path to rename a finished file to: behind its links, so that a link stays a link.

    Raises InputError where something stands there that is neither a file nor a folder: a rename would take the place
    of the device itself. A folder is left to the rename, which refuses it.
    """
    try:
        device = path.exists() and not path.is_file() and not path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from error
    if device:
        raise InputError(f"{path}: cannot be written: it is a device or a pipe, no file; choose another place")
    return Path(os.path.realpath(path))
