"""Finds and runs a Triton server: embedded, a local binary, or a container.

>>> from pathlib import Path
>>> from llmserve.server import ServerSettings, start
>>> with start(ServerSettings(Path("model_repository"))) as server:  # doctest: +SKIP
...     print(server.http_url)
http://127.0.0.1:8000
"""

from llmserve.lazy import lazy

<<<<<<< HEAD
__getattr__, __dir__ = lazy(__name__)
=======
from llmserve.contract.address import Address as Address
from llmserve.server.log import Progress as Progress
from llmserve.server.server import Server as Server
from llmserve.server.settings import Runtime as Runtime
from llmserve.server.settings import ServerSettings as ServerSettings
from llmserve.server.settings import port_problems as port_problems
from llmserve.server.startup import find_problems as find_problems
from llmserve.server.startup import first_available as first_available
from llmserve.server.startup import one_log as one_log
from llmserve.server.startup import settings_of_each as settings_of_each
from llmserve.server.startup import start as start
from llmserve.server.startup import start_all as start_all
from llmserve.server.startup import with_dependents as with_dependents
>>>>>>> main
