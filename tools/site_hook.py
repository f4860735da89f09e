"""Hook of mkdocs.yml: pages that render on GitHub also render on the site, with all the files that they link.

A file outside docs/ that a page links becomes a part of the site, under `files`. The name of a code block is its title.
Headings have the anchors that GitHub gives them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify

DOCS = Path(__file__).resolve().parent.parent / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
NAMED_BLOCK = re.compile(r"(?:^ *File `[^`\n]+`:\n\n)?^( *```\w+) (\S+)$", re.MULTILINE)
AS_PAGE = {".py": "python", ".yaml": "yaml"}
HIDDEN = "---\nsearch: {exclude: true}\n---\n"


def on_config(config: Any) -> None:
    """Give headings the anchors of GitHub."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: Any) -> None:
    """Add the files outside docs/ that pages link, and those that these link."""
    pages = sorted(DOCS.glob("*.md"))
    added: set[Path] = set()
    for page in pages:  # grows
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            file = target(page, link)
            if file.is_file() and not file.is_relative_to(DOCS) and file not in added:
                added.add(file)
                files.append(copy(file, config))
                pages += [file] if file.suffix == ".md" else []


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links and titles of blocks for the site."""
    folder = os.path.dirname(page.file.src_uri)
    source = DOCS.parent / folder.removeprefix("files/") / "x" if folder.startswith("files") else DOCS / "x"

    def in_site(match: re.Match[str]) -> str:
        file = target(source, match[1])
        return os.path.relpath(uri(file), folder or ".") if file.is_file() else match[1]

    return NAMED_BLOCK.sub(r'\1 title="\2"', LINK.sub(in_site, text))


def target(page: Path, link: str) -> Path:
    """Return the file that a page links; for a folder its README."""
    file = (page.parent / link).resolve()
    return file / "README.md" if file.is_dir() else file


def uri(file: Path) -> str:
    """Return where the site has a file."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"files/{file.relative_to(DOCS.parent).as_posix()}" + (".md" if file.suffix in AS_PAGE else "")


def copy(file: Path, config: Any) -> File:
    """Return a file outside docs/ as a file of the site: sources as pages, all others as they are."""
    content: str | bytes = file.read_bytes()
    if file.suffix in AS_PAGE:
        name, text = file.relative_to(DOCS.parent).as_posix(), file.read_text(encoding="utf-8")
        content = f"{HIDDEN}# {name}\n\n````{AS_PAGE[file.suffix]}\n{text}````\n"
    elif file.suffix == ".md":
        content = HIDDEN + file.read_text(encoding="utf-8")
    return File.generated(config, uri(file), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
