"""Serve language models with NVIDIA Triton, through plugins.

    import llmserve

    llmserve.build("hf", "demo", output="model_repository")
    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like").text)

Names are loaded on first use, so that importing llmserve is cheap and
loads neither torch nor transformers nor click.
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
