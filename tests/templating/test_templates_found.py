"""Templates are found in a wheel and in a checkout, and missing ones are said to be missing."""

from __future__ import annotations

from importlib import resources as importlib_resources
from pathlib import Path

import jinja2
import pytest

from loka.errors import InputError
from loka.templating import templates as template_folder


def place(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    package.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(importlib_resources, "files", lambda name: package)


@pytest.mark.slow
def test_a_wheel_comes_before_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loka"
    place(monkeypatch, package)
    with pytest.raises(InputError, match="install LoKA again"):
        template_folder.templates_folder()
    for folder in (tmp_path / "templates", package / "_share" / "templates"):
        folder.mkdir(parents=True)
        (folder / "kernels.py.j2").write_text("", encoding="utf-8")
        assert Path(str(template_folder.templates_folder())).resolve() == folder


def test_every_template_compiles_and_an_unknown_name_is_an_error() -> None:
    templates = template_folder.load_templates()
    names = [name for name, _ in templates.texts]
    assert {"init.py.j2", "kernels.py.j2", "modules.py.j2"} <= set(names)
    for name in names:
        templates.environment.get_template(name)
    with pytest.raises(jinja2.UndefinedError):
        templates.render("init.py.j2", {})
