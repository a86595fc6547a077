"""Where the stand-in of the embedded server finds what the engine was built from."""

from __future__ import annotations

import json

from llmserve.builder.context import BuildContext
from llmserve.sources import DEMO


def stand_in_of(context: BuildContext) -> str:
    """Return where the model lies, as the JSON that ``llmserve.runtime.located`` reads.

    Nothing is copied: with a GPU nobody reads it.
    """
    source = context.source
    if source.asked == DEMO:
        return json.dumps({"demo": True})
    if source.repo_id and source.revision:
        return json.dumps({"id": source.repo_id, "revision": source.revision})
    return json.dumps({"path": str(source.path)})
