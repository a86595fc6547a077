"""The hook of MkDocs that adds the pages which do not lie in ``docs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from tests.site import search
from tests.site.pages import DOCS, all_pages, navigation, weight, with_links


def on_config(config: Any) -> Any:
    # The parts that are empty are as long as there are sections of the guide, or modules.
    for section in config["nav"]:
        _fill(section)
    return config


def _fill(section: Any) -> None:
    for title, pages in section.items() if isinstance(section, dict) else ():
        if pages == []:
            section[title] = navigation()[title]
        elif isinstance(pages, list):
            for page in pages:
                _fill(page)


def on_files(files: Files, config: Any) -> Files:
    for path, text in all_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of our own pages lead to files of the repository, so that they work there too."""
    path = page.file.src_uri
    page.meta.setdefault("search", {"boost": weight(path)})
    if path in all_pages():
        return markdown
    return with_links(markdown, DOCS / path, path)


def on_post_build(config: Any) -> None:
    """Search the site that was built as a reader would."""
    index = Path(config["site_dir"], "search", "search_index.json").read_text(encoding="utf-8")
    if missed := search.misses(json.loads(index)):
        raise PluginError("\n".join(missed))
