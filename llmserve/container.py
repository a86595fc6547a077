"""The container that serves a repository: what `build` writes down and `serve` starts."""

from __future__ import annotations

BASE_IMAGE = "nvcr.io/nvidia/tritonserver:26.10-py3"
"""NVIDIA's release that emitted Dockerfiles begin with."""

IMAGE = "llmserve-triton"
"""What the image made from such a Dockerfile is called."""

MODELS = "/models"
HF_HOME = "/hf"
"""Where the repository and the hub's cache are inside."""
