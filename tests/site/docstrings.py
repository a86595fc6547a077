"""An extension of griffe: docstrings, which are written as Sphinx reads them, as Markdown."""

from __future__ import annotations

from typing import Any

import griffe

from tests.site.generated import as_markdown


class AsMarkdown(griffe.Extension):  # type: ignore[misc]
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
