"""Rendering of pages of HTML. Whatever is put into a page is escaped: names may hold anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import jinja2
from markupsafe import Markup

from loka.templating.templates import PAGES, template_texts, templates_folder


def render_page(template: str, values: Mapping[str, object], shown: Callable[[str], str]) -> str:
    """A page from a template below `templates/report`; an undefined name is an error.

    Every text goes through `shown`, and is then escaped for HTML, between tags and in quoted attributes. Raises
    InputError if the templates are missing.
    """
    return _environment(shown).get_template(template).render(values)


@cache
def _environment(shown: Callable[[str], str]) -> jinja2.Environment:
    def finalize(value: object) -> object:
        """A value as it is put into a page, before it is escaped; what a macro made is left as it is."""
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return jinja2.Environment(
        loader=jinja2.DictLoader(dict(template_texts(templates_folder().joinpath(PAGES.rstrip("/")), ""))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=finalize,
        newline_sequence="\n",
    )
