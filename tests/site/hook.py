"""The hook of MkDocs that adds the pages which do not lie in ``docs``."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from tests.site.pages import DOCS, all_pages, images, navigation, with_links


def on_config(config: Any) -> Any:
    # These two parts of the navigation are as long as there are plugins and sections of the guide.
    for section in config["nav"]:
        for title, pages in section.items():
            if pages == []:
                section[title] = navigation()[title]
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, text in all_pages().items():
        files.append(File.generated(config, path, content=text))
    for path, source in images().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of our own pages lead to files of the repository, so that they work there too."""
    path = page.file.src_uri
    if path in all_pages():
        return markdown
    return with_links(markdown, DOCS / path, path)
