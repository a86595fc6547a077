"""Find and run a Triton: embedded, a local binary, or a container.

>>> from pathlib import Path
>>> from llmserve.server import ServerSettings, start
>>> with start(ServerSettings(Path("model_repository"))) as server:  # doctest: +SKIP
...     print(server.http_url)
http://127.0.0.1:8000
"""

from __future__ import annotations

from llmserve.server.handle import Server
from llmserve.server.progress import Progress
from llmserve.server.runtimes import first_available
from llmserve.server.settings import Runtime, ServerSettings
from llmserve.server.startup import start

__all__ = ["Progress", "Runtime", "Server", "ServerSettings", "first_available", "start"]
