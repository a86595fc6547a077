"""What a reader types into the site's search, and the page that it has to lead to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FINDS = {
    "migrate": ("guides/from-ollama.html", "guides/from-vllm.html", "guides/from-triton.html"),
    "ollama": ("guides/from-ollama.html",),
    "modelfile": ("guides/from-ollama.html",),
    "vllm serve": ("guides/from-vllm.html",),
    "model.py": ("guides/from-triton.html",),
    "fine-tuned": ("guides/fine-tuned.html",),
    "chat_template.jinja": ("guides/fine-tuned.html",),
    "lora": ("guides/fine-tuned.html",),
    "systemd": ("guides/systemd.html",),
    "service": ("guides/systemd.html",),
    "daemon": ("guides/systemd.html",),
    "background": ("guides/systemd.html",),
    "nginx": ("guides/keys.html",),
    "https": ("guides/keys.html",),
    "uninstall": ("guides/uninstall.html",),
    "update": ("guides/upgrade.html",),
    "logs": ("guides/logs.html",),
    "limits": ("guides/limits.html",),
}
"""By words: the pages that have to come first, in any order."""
_PLACES = 3
_TAG = re.compile(r"<[^>]+>")
_TITLE = 1000
"""How much a word in a title counts, as in the theme's own search."""


def misses(index: Mapping[str, Any]) -> list[str]:
    """Return for which words the search of a built site does not lead to their pages."""
    pages = {words: found(index, words)[: max(_PLACES, len(FINDS[words]))] for words in FINDS}
    return [
        f"{words!r} leads to {', '.join(pages[words]) or 'nothing'}, and not to {page}"
        for words, expected in FINDS.items()
        for page in expected
        if page not in pages[words]
    ]


def found(index: Mapping[str, Any], words: str) -> list[str]:
    """Return the pages that a search leads to, the best first: lunr's, as in the browser."""
    from lunr import lunr

    documents: Sequence[Mapping[str, Any]] = index["docs"]
    entries = [
        ({**entry, "text": _TAG.sub(" ", entry["text"])}, {"boost": entry.get("boost", 1)})
        for entry in documents
    ]
    fields = [{"field_name": "title", "boost": _TITLE}, "text"]
    search = lunr(ref="location", fields=fields, documents=entries)
    hits = search.search(" ".join(word.replace("-", " ") for word in words.split()))
    return [*dict.fromkeys(hit["ref"].partition("#")[0] for hit in hits)]
