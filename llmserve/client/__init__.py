"""The client of a Triton. It reads from a model's config how to send requests to it.

    import llmserve

    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like", max_tokens=32).text)
        for piece in client.stream("demo", "Programming in C++ is like"):
            print(piece.text, end="", flush=True)

:func:`connect_async` has the same methods for asyncio.
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
