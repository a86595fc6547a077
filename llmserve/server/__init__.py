"""Finds and runs a Triton server: embedded, a local binary, or a container.

>>> from pathlib import Path
>>> from llmserve.server import ServerSettings, start
>>> with start(ServerSettings(Path("model_repository"))) as server:  # doctest: +SKIP
...     print(server.http_url)
http://127.0.0.1:8000
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
