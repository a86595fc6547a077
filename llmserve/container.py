"""The container that serves a repository: what `build` writes down and `serve` starts."""

from __future__ import annotations

import re

BASE_IMAGE = "nvcr.io/nvidia/tritonserver:26.10-py3"
"""NVIDIA's release that emitted Dockerfiles begin with."""

IMAGE = "llmserve-triton"
"""What the image made from such a Dockerfile is called."""

MODELS = "/models"
HF_HOME = "/hf"
"""Where the repository and the hub's cache are inside."""


def image_of(model: str = "") -> str:
    """Return what an image is called: a repository's, or that of a model with one of its own.

    >>> image_of(), image_of("Llama__2")
    ('llmserve-triton', 'llmserve-triton-llama-2')
    """
    # Docker takes small letters, and no two separators in a row.
    own = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{IMAGE}-{own}" if own else IMAGE
