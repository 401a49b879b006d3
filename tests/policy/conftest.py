"""Policies written into a temporary directory, with the expected place of a problem marked in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from loka.errors import Code
from loka.mods.policy_loader import load_policy
from loka.policy.cascade import resolve_settings
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError
from loka.policy.settings import SiteFacts, SiteSettings

MARK = "§".encode()  # stands right before the character at which the problem is expected

Text = str | bytes


def unmark(text: Text) -> tuple[bytes, tuple[int, int] | None]:
    """The text without its mark, and the line and column that the mark stood at."""
    data = text.encode() if isinstance(text, str) else text
    before, mark, after = data.partition(MARK)
    if not mark:
        return data, None
    start = before.removeprefix(b"\xef\xbb\xbf").decode()
    return before + after, (start.count("\n") + 1, len(start) - start.rfind("\n"))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes files into the current directory, a temporary one, without their marks; gives the path of the first."""
    monkeypatch.chdir(tmp_path)

    def put(files: Text | Mapping[str, Text]) -> Path:
        named = files if isinstance(files, Mapping) else {"ranker.yaml": files}
        for name, text in named.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(unmark(text)[0])
        return Path(next(iter(named)))

    return put


@pytest.fixture
def load(write: Callable[..., Path]) -> Callable[..., Policy]:
    """Loads a policy from its text, or from several files, the policy first."""
    return lambda files: load_policy(write(files))


@pytest.fixture
def resolve(load: Callable[..., Policy]) -> Callable[..., tuple[SiteSettings, ...]]:
    """Loads a policy and applies it to sites."""

    def apply(files: Text | Mapping[str, Text], facts: list[SiteFacts]) -> tuple[SiteSettings, ...]:
        return resolve_settings(load(files), facts)

    return apply


@pytest.fixture
def refused() -> Callable[..., None]:
    """Asserts that a call reports exactly one problem, at the mark in the text, with a code, and says what to do."""

    def check(
        call: Callable[..., object], files: Text | Mapping[str, Text], code: Code, says: str, *rest: object
    ) -> None:
        named = files if isinstance(files, Mapping) else {"ranker.yaml": files}
        places = [(name, *place) for name, text in named.items() if (place := unmark(text)[1])]
        assert len(places) == 1, "a test text has one mark"
        with pytest.raises(PolicyError) as caught:
            call(files, *rest)
        found = [(each.place.file, each.place.line, each.place.column) for each in caught.value.problems]
        assert found == places, str(caught.value)
        assert says in caught.value.problems[0].message
        file, line, column = places[0]
        assert caught.value.code is code
        assert str(caught.value) == f"{file}:{line}:{column}: {caught.value.problems[0].message} [{code}]"
        assert caught.value.exit_status == 2

    return check
