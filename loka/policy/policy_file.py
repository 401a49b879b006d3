"""Reading a policy file: a regular file of bounded size, in UTF-8, without control characters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loka.paths import open_plain
from loka.policy.problems import Place, PolicyError, problem

MAX_BYTES = 1_000_000

# Characters allowed in YAML, except U+0085, U+2028 and U+2029, which are line breaks in YAML 1.1 but not in editors.
_REFUSED = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAK = re.compile("\r\n|\r|\n")
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The text of one policy file, without a byte order mark."""

    file: str  # as named by the user
    text: str


def read_source(path: str, file: str) -> PolicySource:
    """Reads `path`, named `file` in messages.

    Raises PolicyError if it cannot be opened, is larger than `MAX_BYTES`, is not UTF-8 or contains control characters.
    """
    return PolicySource(file, decode(_read(path, file), file))


def decode(data: bytes, file: str) -> str:
    """Decodes UTF-8; raises PolicyError at the first byte or character that is not allowed."""
    if data.startswith(_UTF_16_OR_32):
        raise _refuse(file, 1, 1, "the file is in UTF-16 or UTF-32; save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise _refuse(file, *line_and_column(before), message) from None
    found = _REFUSED.search(text)
    if found:
        code = ord(found[0])
        name = "a NUL character" if code == 0 else f"the control character U+{code:04X}"
        raise _refuse(file, *line_and_column(text[: found.start()]), f"{name} in the file; remove it")
    return text


def line_and_column(before: str) -> tuple[int, int]:
    """The 1-based position after a text from the start of the file."""
    lines = _BREAK.split(before)
    return len(lines), len(lines[-1]) + 1


def _read(path: str, file: str) -> bytes:
    try:
        with open_plain(path, largest=None) as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _refuse(file, 0, 0, "no such file; check the path") from None
    except IsADirectoryError:
        raise _refuse(file, 0, 0, "is a directory; give the path of a policy") from None
    except OSError as error:
        raise _refuse(file, 0, 0, f"cannot be read ({error.strerror}); check the path and its permissions") from None
    except ValueError:  # a NUL or a lone surrogate in the path
        raise _refuse(file, 0, 0, "is no valid path; check its characters") from None
    if len(data) > MAX_BYTES:
        raise _refuse(file, 0, 0, f"over {MAX_BYTES} bytes; a policy is a short text: use broader rules")
    return data


def _refuse(file: str, line: int, column: int, message: str) -> PolicyError:
    return PolicyError([problem(Place(file, line, column), message)])
