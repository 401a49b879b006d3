"""Templates, from inside an installed LoKA or from beside the package in a checkout, rendered to code and to pages.

Whatever is put into a page of HTML is escaped: names may hold anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import jinja2
from markupsafe import Markup

from loka.errors import InputError
from loka.templating.wrap import wrap

KERNELS = "triton/"  # folder of the templates of kernels
PAGES = "report/"  # folder of the templates of pages, no part of any package
OMIT = "\0"  # value of `omit` in templates: its line is left out
_SUFFIX = ".j2"
_FIRST = "kernels.py" + _SUFFIX
_NOTHING = re.compile(r"^ +\n", re.MULTILINE)  # a line whose only expression was empty


@dataclass(frozen=True, slots=True)
class Templates:
    """All templates of code by path below `templates/`, and the environment that renders them."""

    texts: tuple[tuple[str, str], ...]
    environment: jinja2.Environment

    def render(self, template: str, values: Mapping[str, object]) -> str:
        """Render a template and wrap long lines; an undefined name is an error.

        A line of only spaces is dropped (`    {{ "x = x + add" if spec.add }}` may leave one), and so is a line with
        `omit` in it: `del {{ names | join(", ") or omit }}`.
        """
        text = _NOTHING.sub("", self.environment.get_template(template).render(values))
        return wrap("\n".join(line for line in text.split("\n") if OMIT not in line))

    def hashes(self, *, kernels: bool = True) -> dict[str, str]:
        """sha256 of each template; those of kernels only with `kernels`."""
        return {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in self.texts
            if kernels or not name.startswith(KERNELS)
        }


def templates_folder() -> Traversable:
    """The folder of templates: `loka/_share/templates` in a wheel, otherwise `templates` beside the package.

    Raises InputError if neither exists.
    """
    package = resources.files("loka")
    places = [package.joinpath("_share", "templates"), package.joinpath("..", "templates")]
    for place in places:
        if place.joinpath(_FIRST).is_file():
            return place
    raise InputError(
        f"LoKA's templates are missing: there is neither {places[0]} nor {places[1]}; install LoKA again, or run it "
        "from a whole checkout"
    )


@cache
def load_templates() -> Templates:
    """All templates of code, read once per process. Raises InputError if they are missing."""
    texts = tuple(sorted(each for each in template_texts(templates_folder(), "") if not each[0].startswith(PAGES)))
    return Templates(texts, _environment(dict(texts)))


def template_texts(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    """The templates below a folder: `prefix` with the path below it, and the text."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from template_texts(item, f"{prefix}{item.name}/")
        elif item.name.endswith(_SUFFIX):
            yield prefix + item.name, item.read_text(encoding="utf-8").replace("\r\n", "\n")


def _environment(texts: dict[str, str]) -> jinja2.Environment:
    # The output is Python, not HTML: every value comes from a checked spec or was escaped for its place.
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(texts),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        newline_sequence="\n",
    )
    environment.globals["omit"] = OMIT
    environment.filters |= {"at": _at, "tuple": _tuple, "targets": _targets, "signature": _signature}
    return environment


def _at(text: str, columns: int) -> str:
    """Indent a macro's output by `columns`, except its first line; blank lines are dropped.

    Used as `        {{ quantize_row(spec) | at(8) }}`, at the indentation of the output.
    """
    return f"\n{' ' * columns}".join(line for line in text.split("\n") if line.strip())


def _tuple(items: Iterable[object]) -> str:
    """A tuple literal: "(a, b)", "(a,)"; "" for no items."""
    texts = [str(item) for item in items]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})" if texts else ""


def _targets(names: Iterable[str]) -> str:
    """Assignment targets of a tuple: "a, b", "(a,)"; "" for no names."""
    found = list(names)
    return _tuple(found) if len(found) == 1 else ", ".join(found)


def _signature(parameters: Mapping[str, str]) -> str:
    """Parameters with types: "x: Tensor, counter_id: int"."""
    return ", ".join(f"{name}: {kind}" for name, kind in parameters.items())


def render_page(template: str, values: Mapping[str, object], shown: Callable[[str], str]) -> str:
    """A page from a template below `templates/report`; an undefined name is an error.

    Every text goes through `shown`, and is then escaped for HTML, between tags and in quoted attributes. Raises
    InputError if the templates are missing.
    """
    return _page_environment(shown).get_template(template).render(values)


@cache
def _page_environment(shown: Callable[[str], str]) -> jinja2.Environment:
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
