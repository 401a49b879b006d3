"""The tour of docs/architecture.md names every room, files that exist, and an order that import-linter holds."""

from __future__ import annotations

import re
import tomllib

from tests.support import markdown

TOUR = markdown.read(markdown.REPOSITORY / "docs" / "architecture.md")
LOKA = markdown.REPOSITORY / "loka"
ROOMS = re.findall(r"^\*\*`loka/(\w+)`\*\*", TOUR, re.MULTILINE)


def test_every_room_has_a_paragraph() -> None:
    assert sorted(ROOMS) == sorted(folder.name for folder in LOKA.iterdir() if (folder / "__init__.py").exists())


def test_the_rooms_stand_in_the_order_of_imports() -> None:
    settings = tomllib.loads(markdown.read(markdown.REPOSITORY / "pyproject.toml"))
    layers = next(each for each in settings["tool"]["importlinter"]["contracts"] if each["type"] == "layers")["layers"]
    assert [layer.removeprefix("loka.") for layer in layers] == ROOMS


def test_every_file_beside_the_rooms_is_named() -> None:
    files = {f"loka/{file.name}" for file in LOKA.glob("*.py") if not file.name.startswith("__")}
    assert files <= set(markdown.paths(TOUR))


def test_every_path_exists() -> None:
    assert [path for path in markdown.paths(TOUR) if not (markdown.REPOSITORY / path).exists()] == []


def test_every_folder_and_file_named_in_a_rooms_paragraph_is_in_that_room() -> None:
    for room in ROOMS:
        paragraph = TOUR.partition(f"**`loka/{room}`**")[2].partition("\n\n")[0]
        for name in re.findall(r"`(\w+/|(?:\w+/)?\w+\.py)`", paragraph):
            if name != "NAME.py":
                assert (LOKA / room / name).exists(), f"{room}: {name}"


def test_every_type_named_is_in_the_source() -> None:
    """Names in CamelCase are classes or aliases of the rooms: nothing else is written so."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in LOKA.rglob("*.py"))
    for name in set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][A-Za-z]*)*)`", TOUR)):
        assert re.search(rf"^(?:class {name}\b|{name} =)", source, re.MULTILINE), name


def test_every_function_named_is_in_the_source() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in LOKA.rglob("*.py"))
    steps = TOUR.partition("Between rooms")[2].partition("## Rules")[0]
    for name in set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", steps)):
        assert re.search(rf"^ *def {name}\b", source, re.MULTILINE), name
