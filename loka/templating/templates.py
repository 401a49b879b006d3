"""Where templates live: inside an installed LoKA, or beside the package in a checkout."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import jinja2

from loka.errors import InputError
from loka.templating.wrap import wrap

KERNELS = "triton/"  # the templates of kernels, in a folder of their own
OMIT = "\0"  # `omit` in a template: the line that it is in is left out
_SUFFIX = ".j2"
_FIRST = "kernels.py" + _SUFFIX
_NOTHING = re.compile(r"^ +\n", re.MULTILINE)  # a line whose only expression gave nothing


@dataclass(frozen=True, slots=True)
class Templates:
    """Every template, by its path below `templates/`, with the environment that renders them."""

    texts: tuple[tuple[str, str], ...]
    environment: jinja2.Environment

    def render(self, template: str, values: Mapping[str, object]) -> str:
        """One template's text, with long lines wrapped; a name that it reads and was not given is an error.

        A line of spaces alone is dropped (`    {{ "x = x + add" if spec.add }}` leaves one where nothing is added), and
        so is one with `omit` in it: `del {{ names | join(", ") or omit }}`.
        """
        text = _NOTHING.sub("", self.environment.get_template(template).render(values))
        return wrap("\n".join(line for line in text.split("\n") if OMIT not in line))

    def hashes(self, *, kernels: bool = True) -> dict[str, str]:
        """sha256 of each template, those of kernels only where a package has `kernels`."""
        return {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in self.texts
            if kernels or not name.startswith(KERNELS)
        }


def templates_folder() -> Traversable:
    """The folder of templates: `loka/_share/templates` of a wheel, else `templates` beside the package.

    Raises InputError where neither is there.
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
    """All templates, read once for each process. Raises InputError where they are missing."""
    texts = tuple(sorted(_texts(templates_folder(), "")))
    return Templates(texts, _environment(dict(texts)))


def _texts(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _texts(item, f"{prefix}{item.name}/")
        elif item.name.endswith(_SUFFIX):
            yield prefix + item.name, item.read_text(encoding="utf-8").replace("\r\n", "\n")


def _environment(texts: dict[str, str]) -> jinja2.Environment:
    # What is rendered is Python, not HTML: every value comes from a checked spec or was made safe for its place.
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
    """What a macro wrote, each of its lines but the first behind so many spaces; blank ones are left out.

    So `        {{ quantise_row(spec) | at(8) }}` stands where its lines will.
    """
    return f"\n{' ' * columns}".join(line for line in text.split("\n") if line.strip())


def _tuple(items: Iterable[object]) -> str:
    """A tuple's literal: "(a, b)", "(a,)"; "" for none."""
    texts = [str(item) for item in items]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})" if texts else ""


def _targets(names: Iterable[str]) -> str:
    """What a tuple is assigned to: "a, b", "(a,)"; "" for none."""
    found = list(names)
    return _tuple(found) if len(found) == 1 else ", ".join(found)


def _signature(parameters: Mapping[str, str]) -> str:
    """Names with their types: "x: Tensor, counter_id: int"."""
    return ", ".join(f"{name}: {kind}" for name, kind in parameters.items())
