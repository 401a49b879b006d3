"""A hook of mkdocs: pages of the repository that lie beside docs/ become pages of the site.

Links to them lead there; links to other files of the repository, as scripts, become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(
    r"```.*?^```|`[^`]*`|\[(?P<text>(?:[^\]`]|`[^`]*`)*)\]\((?P<target>[^)\s]+)\)", re.DOTALL | re.MULTILINE
)


def relinked(text: str, folder: str, page: str) -> str:
    """A page with its links as the site has them. `folder`: where its text lies; `page`: its place below docs/."""

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = (match["target"] or "").partition("#")
        if not target or "://" in target:
            return match[0]
        path = os.path.normpath(PurePosixPath(folder, target))
        place = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not place or place.endswith((".json", ".jsonl", ".py")):
            return match["text"]
        return f"[{match['text']}]({os.path.relpath(place, PurePosixPath(page).parent)}{hash_}{anchor})"

    return _LINK.sub(link, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page before it becomes HTML."""
    place = page.file.src_uri
    sources = {made: source for source, made in PAGES.items()}
    source = sources.get(place, f"docs/{place}")
    return relinked(markdown, str(PurePosixPath(source).parent), place)
