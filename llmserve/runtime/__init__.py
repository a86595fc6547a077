"""The code that runs inside Triton's Python backend, and the only import that plugins need there.

Everything here is loaded in the server's stub process. It imports the standard library and numpy,
torch and transformers only where they are used, and nothing else of llmserve. Each name is loaded
on first use, so that the builder can read the tensor contract without numpy.

A request travels ``model`` → ``request`` → a driver (``batch``, ``continuous``) → a generator →
``generation`` → a formatter → ``responder``.
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
