"""``llmserve warm``: what ``serve --warm`` has kept of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from llmserve.commands import print_json, print_table
from llmserve.errors import ConfigError
from llmserve_cli.usage import Group

if TYPE_CHECKING:
    from llmserve.runtime import PageFile, PageFiles

_DAY, _HOUR, _MINUTE = 86400, 3600, 60
_MB = 1_000_000


@click.group(cls=Group)
def warm() -> None:
    """List and clear what is kept of prompts.

    With serve --warm, full pages of the cache are kept on disk, so that a prompt that begins as an
    earlier one need not be read again. Prompts can be derived from them. They lie in this user's
    folder of llmserve, or below LLMSERVE_HOME, where only this user can read them.

    \b
    llmserve warm list
    llmserve warm clear
    """


@warm.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_pages(as_json: bool) -> None:
    """List how much is kept of the prompts of each model.

    \b
    llmserve warm list
    """
    files = _files()
    by_model: dict[str, list[PageFile]] = {}
    for page in files.pages() if files else ():
        by_model.setdefault(page.label, []).append(page)
    if as_json:
        print_json([{"model": name, **_sums(pages)} for name, pages in sorted(by_model.items())])
        return
    if not by_model:
        click.echo("llmserve: nothing is kept of prompts", err=True)
        return
    rows = [["MODEL", "TOKENS", "MB", "USED"]]
    for name, pages in sorted(by_model.items()):
        sums = _sums(pages)
        used = _ago(time.time() - sums["used"])
        rows.append([name, f"{sums['tokens']:.0f}", f"{sums['bytes'] / _MB:.0f}", used])
    print_table(rows)


@warm.command()
@click.argument("model", required=False)
def clear(model: str | None) -> None:
    """Delete what is kept of prompts, of all models or of one.

    A running server goes on, and keeps what it reads from now on.

    \b
    llmserve warm clear
    llmserve warm clear demo
    """
    files = _files()
    count = files.clear(model) if files else 0
    click.echo(f"llmserve: {count} pages are deleted", err=True)


def _files() -> PageFiles | None:
    """Return what is kept; None if nothing ever was."""
    from llmserve.plugin import pages_folder
    from llmserve.runtime import PageFiles, PageFolderError

    folder = pages_folder()
    if not folder.exists():
        return None
    try:
        return PageFiles(folder, 0)
    except PageFolderError as error:
        raise ConfigError(str(error), hint="delete it, or set LLMSERVE_HOME") from None


def _sums(pages: Sequence[PageFile]) -> dict[str, float]:
    return {
        "pages": len(pages),
        "tokens": sum(page.tokens for page in pages),
        "bytes": sum(page.bytes for page in pages),
        "used": max(page.used for page in pages),
    }


def _ago(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} ago"
    return "now"
