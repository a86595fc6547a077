"""A report as one HTML file, with its style and its plots inside."""

from __future__ import annotations

from importlib.resources import files

from llmserve.report.page import Page
from llmserve.report.palette import DARK, LIGHT


def render_html(page: Page) -> str:
    """Write a page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("llmserve.report") / "templates"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    style = stylesheet() + (folder / "page.css").read_text(encoding="utf-8")
    # Ours, and escaped where it was made: plots come from an XML writer.
    text = template.render(page=page, style=Markup(style), markup=Markup)  # noqa: S704
    return text if text.endswith("\n") else f"{text}\n"


def stylesheet() -> str:
    """Give the colours as CSS, for the page and for the plots in it."""
    light = ";".join(f"--{key_of(key)}:{value}" for key, value in LIGHT.items())
    dark = ";".join(f"--{key_of(key)}:{value}" for key, value in DARK.items())
    plots = "".join(
        f".f-{key}{{fill:var(--{key_of(key)})}}.s-{key}{{stroke:var(--{key_of(key)})}}"
        for key in LIGHT
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{plots}\n"


def key_of(key: str) -> str:
    """Name a custom property; those of CSS read better with a letter first."""
    return f"series-{key}" if key.isdigit() else key
