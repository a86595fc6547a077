"""Find and run a Triton: embedded, a local binary, or a container.

>>> from pathlib import Path
>>> from llmserve.server import ServerSettings, start
>>> with start(ServerSettings(Path("model_repository"))) as server:  # doctest: +SKIP
...     print(server.http_url)
http://127.0.0.1:8000
"""

from __future__ import annotations

from llmserve.server.log import Progress
from llmserve.server.server import Server
from llmserve.server.settings import Runtime, ServerSettings, port_problems
from llmserve.server.startup import (
    find_problems,
    first_available,
    one_log,
    settings_of_each,
    start,
    start_all,
)

__all__ = [
    "Progress",
    "Runtime",
    "Server",
    "ServerSettings",
    "find_problems",
    "first_available",
    "one_log",
    "port_problems",
    "settings_of_each",
    "start",
    "start_all",
]
