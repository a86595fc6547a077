"""The API for plugin code that runs where models are built, in a single module.

    from llmserve.plugin import Option, Tokenizer, hookimpl

Code that runs inside Triton imports :mod:`llmserve.runtime` instead. Importing this module loads
neither torch nor transformers nor click: each name is loaded on first use.
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
