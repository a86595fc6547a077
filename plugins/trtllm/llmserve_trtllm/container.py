"""The container of the version at hand, which brings what TensorRT-LLM needs."""

from __future__ import annotations

from llmserve.builder.context import Container
from llmserve_trtllm.versions import Version, container_of

_BROUGHT = (
    "accelerate", "huggingface-hub", "numpy", "safetensors", "sentencepiece", "tensorrt-llm",
    "tokenizers", "torch", "transformers",
)  # fmt: skip
"""What TensorRT-LLM itself is installed with: another version of it may break it."""


def container(version: Version) -> Container:
    """Return NVIDIA's container that has a version, as far as one is known."""
    return Container(container_of(version), _BROUGHT)
